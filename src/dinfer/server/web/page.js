// The page: asks the server for an answer with its canvas, keeps every step, and draws any of them.

const $ = (id) => document.getElementById(id);
const KINDS = ["decoder", "cache", "iteration"];
const PLAY_MS = 250;
let models = [];
let running = null; // the AbortController of the runs in progress

class Run {
  /** One answer: its steps, and the section that shows one of them. */
  constructor(title) {
    this.root = $("run-template").content.firstElementChild.cloneNode(true);
    this.at = (selector) => this.root.querySelector(selector);
    this.at("h2").textContent = title;
    this.canvas = this.at(".canvas");
    this.slider = this.at("input");
    this.steps = [];
    this.cells = [];
    this.shown = 0;
    this.here = -1;
    this.end = Infinity;
    this.begun = performance.now();
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.root.querySelectorAll("[data-go]").forEach((button) =>
      button.addEventListener("click", () => this.go(button.dataset.go)));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    for (const kind of ["click", "pointerover"]) {
      this.canvas.addEventListener(kind, (event) => this.point(this.cells.indexOf(event.target)));
    }
  }

  /** Takes a step of the canvas; a view of the latest one goes along. */
  add(step) {
    if (step.length !== null) {
      this.cells = Array.from({ length: step.length }, () => document.createElement("span"));
      this.canvas.replaceChildren(...this.cells);
    }
    const latest = this.shown >= this.steps.length - 1;
    this.steps.push(step);
    this.slider.max = this.steps.length - 1;
    if (latest) this.show(this.steps.length - 1);
  }

  /** Draws the canvas as it was after step `number`. */
  show(number) {
    this.shown = Math.max(0, Math.min(number, this.steps.length - 1));
    this.slider.value = this.shown;
    this.state = new Map();
    for (const step of this.steps.slice(0, this.shown + 1)) {
      step.positions.forEach((place, i) => this.state.set(place, {
        token: step.tokens[i], confidence: step.confidence[i], step: step.step,
      }));
    }
    const finished = this.shown === this.steps.length - 1;
    this.cells.forEach((cell, place) => {
      const found = this.state.get(place);
      const set = found !== undefined && found.token !== "";
      cell.textContent = set ? shown(found.token) : "·";
      cell.className = "cell";
      cell.classList.toggle("set", set && found.step > 0);
      cell.classList.toggle("fixed", set && found.step === 0);
      cell.classList.toggle("fresh", set && found.step === this.shown && this.shown > 0);
      cell.classList.toggle("past", finished && place >= this.end);
      cell.classList.toggle("here", place === this.here);
      cell.style.setProperty("--confidence", set ? found.confidence : 1);
    });
    this.cost();
    this.tell();
  }

  cost() {
    const step = `forward ${this.shown} of ${this.steps.length - 1}`;
    const stats = this.stats;
    const seconds = stats ? stats.seconds : (performance.now() - this.begun) / 1000;
    const rate = stats ? ` · ${stats.tokens_per_forward.toFixed(1)} tokens a forward` : "";
    this.at(".cost").textContent = `${step}${rate} · ${seconds.toFixed(2)} s`;
  }

  /** What stands at the position that was pointed at. */
  tell() {
    const found = this.state?.get(this.here);
    const what = found === undefined || found.token === "" ? "masked"
      : found.step === 0 ? `${JSON.stringify(found.token)}, given`
      : `${JSON.stringify(found.token)}, confidence ${found.confidence.toFixed(3)}, set in forward ${found.step}`;
    this.at(".about").textContent = this.here < 0 ? "\u00a0" : `Position ${this.here}: ${what}`;
  }

  point(place) {
    if (place < 0) return;
    this.cells[this.here]?.classList.remove("here");
    this.here = place;
    this.cells[place].classList.add("here");
    this.tell();
  }

  move(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (way === undefined || !this.cells.length) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(this.here + way, this.cells.length - 1)));
  }

  go(where) {
    clearInterval(this.timer);
    if (where !== "play") {
      const last = this.steps.length - 1;
      this.show({ first: 0, back: this.shown - 1, on: this.shown + 1, last }[where]);
      return;
    }
    this.show(0);
    this.timer = setInterval(() => {
      this.show(this.shown + 1);
      if (this.shown >= this.steps.length - 1) clearInterval(this.timer);
    }, PLAY_MS);
  }

  /** Takes a chunk of the stream. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.canvas) this.add(chunk.canvas);
    for (const choice of chunk.choices) {
      this.at(".text").textContent += choice.text;
      if (!choice.finish_reason) continue;
      this.stats = choice.stats;
      if (choice.token_ids) this.end = choice.token_ids.length;
      for (const [number, hole] of (choice.holes ?? []).entries()) {
        const item = document.createElement("li");
        const sure = hole.mean_confidence.toFixed(3);
        item.textContent = `hole ${number + 1}: ${JSON.stringify(hole.text)}, confidence ${sure}`;
        this.at(".holes").append(item);
      }
      this.show(this.shown);
      this.root.dataset.done = "yes";
    }
  }
}

/** A token in its cell: what cannot be seen or takes much room has a sign of its own. */
function shown(token) {
  return /^<\|.*\|>$/.test(token) ? "■" : token.replaceAll("\n", "↵");
}

/** Sends a call; its answer, or an Error with the server's own sentence. */
async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new Error(said?.error?.message ?? `The server answered ${answer.status}.`);
}

/** The events of a stream, each parsed. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function body(choice) {
  const asked = {
    model: $("model").value, prompt: $("prompt").value, stream: true,
    stream_options: { include_canvas: true },
  };
  for (const name of ["temperature", "seed"]) asked[name] = Number($(name).value);
  for (const input of choice.querySelectorAll("input")) {
    if (input.value.trim()) asked[input.dataset.kind] = input.value.trim();
  }
  if (mode() === "answer") return { ...asked, max_tokens: Number($("max_tokens").value) };
  return { ...asked, text: $("text").value };
}

const mode = () => document.querySelector("[name=mode]:checked").value;
const chosen = () => [...document.querySelectorAll(".choice:not([hidden])")];

async function run(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  $("error").textContent = "";
  $("run").disabled = true;
  $("stop").disabled = false;
  const path = mode() === "answer" ? "v1/completions" : "v1/infill";
  const runs = chosen().map((choice) => {
    const { decoder, cache, iteration } = body(choice);
    const model = models.find((one) => one.id === $("model").value) ?? {};
    return new Run([decoder ?? model.decoder, cache ?? model.cache, iteration ?? model.iteration]
      .filter(Boolean).join(" · "));
  });
  $("runs").replaceChildren(...runs.map((one) => one.root));
  $("runs").scrollIntoView({ block: "nearest" }); // on a phone it lies below the form
  try {
    await Promise.all(chosen().map(async (choice, i) => {
      const answer = await call(path, body(choice), running.signal);
      for await (const chunk of events(answer)) runs[i].take(chunk);
    }));
  } catch (error) {
    if (error.name !== "AbortError") $("error").textContent = error.message;
    running.abort();
    for (const one of runs) if (!one.steps.length) one.root.remove();
  }
  running = null;
  $("run").disabled = false;
  $("stop").disabled = true;
}

/** Placeholders say what the model recommends. */
function recommend() {
  const model = models.find((one) => one.id === $("model").value);
  for (const input of document.querySelectorAll("[data-kind]")) {
    input.placeholder = model?.[input.dataset.kind] ?? "";
  }
}

async function load() {
  try {
    models = (await (await call("v1/models")).json()).data;
    $("model").replaceChildren(...models.map((one) => new Option(one.id)));
    recommend();
    const known = await (await call("v1/strategies")).json();
    for (const kind of KINDS) {
      $(`${kind}-specs`).replaceChildren(...known[kind].map((one) => {
        const options = Object.entries(one.options).map(([name, value]) => `:${name}=${value}`);
        return new Option(one.about, one.name + options.join("").replaceAll("null", "none"));
      }));
    }
    $("error").textContent = "";
  } catch (error) {
    $("error").textContent = error.message;
  }
}

for (const name of ["Strategies", "Other strategies"]) {
  const choice = $("choice-template").content.firstElementChild.cloneNode(true);
  choice.querySelector("legend").textContent = name;
  choice.hidden = $("choices").childElementCount > 0;
  $("choices").append(choice);
}
$("settings").open = window.matchMedia("(min-width: 40rem)").matches; // a phone has no room
$("ask").addEventListener("submit", run);
$("stop").addEventListener("click", () => running?.abort());
$("model").addEventListener("change", recommend);
$("key").addEventListener("change", load);
$("compare").addEventListener("change", () => {
  $("choices").lastElementChild.hidden = !$("compare").checked;
  if ($("compare").checked) $("settings").open = true;
});
for (const radio of document.querySelectorAll("[name=mode]")) {
  radio.addEventListener("change", () => {
    $("text-label").hidden = mode() !== "fill";
    $("max_tokens").parentElement.hidden = mode() === "fill";
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
load();

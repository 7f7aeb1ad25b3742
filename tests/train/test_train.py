"""Problems, briefs, the loss and the training run."""

import itertools
import json
import random
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dinfer.errors import DinferError
from dinfer.loader.load import load
from dinfer.train import corpus
from dinfer.train.brief import Brief, draw_brief, facts_right
from dinfer.train.corpus import SPLITS, TASKS, Ids, draws, first_of, make_tokenizer, split_of
from dinfer.train.init_from import grow
from dinfer.train.loss import bidirectional_batch, block_causal_batch, dense_attention
from dinfer.train.muon import orthogonalise
from dinfer.train.own_data import endless, read_examples
from dinfer.train.problems import draw_problem, final_number
from dinfer.train.recipe import RECIPES
from dinfer.train.run import TrainOptions, train_bundled


def test_every_step_of_a_worked_answer_is_right() -> None:
    """Each `a?b=c` of an answer is checked with Python's own arithmetic; the last result is the
    final number.
    """
    rng = random.Random(5)
    for _ in range(3000):
        problem = draw_problem(rng)
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", problem.answer)
        assert 1 <= len(steps) <= 4
        for a, sign, b, c in steps:
            # A product of the result checks a division without a remainder.
            left = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a)}
            assert left[sign] == (int(c) * int(b) if sign == "/" else int(c))
        assert final_number(problem.answer) == problem.result == int(steps[-1][3])
        asked = set(re.findall(r"\d+", problem.question))
        results = {c for *_, c in steps}
        assert {n for a, _, b, _ in steps for n in (a, b)} <= asked | results


def test_every_figure_of_a_brief_follows_from_its_table() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        brief = draw_brief(rng)
        table = dict(line.split(": ") for line in brief.prompt.split("\n")[:-1])
        revenue, before = int(table["Revenue"]), int(table["Revenue before"])
        profit, earned = revenue - int(table["Costs"]), int(table["Profit before"])
        facts = brief.facts
        assert int(facts["change"]) == abs(revenue - before)
        assert int(facts["growth"]) * before == 100 * abs(revenue - before)
        assert int(facts["profit"]) == profit and int(facts["margin"]) * revenue == 100 * profit
        assert int(facts["gain"]) == abs(profit - earned)
        assert (facts["moved"] == "up") == (revenue > before)
        assert facts_right(brief, brief.answer) == 1.0


def test_a_wrong_figure_is_one_fact_less() -> None:
    brief = draw_brief(random.Random(1))
    wrong = brief.answer.replace(f"a margin of {brief.facts['margin']}%", "a margin of 77%")
    assert facts_right(brief, wrong) == pytest.approx(1 - 1 / len(brief.facts))
    assert facts_right(brief, "") == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_problem(task: str) -> None:
    keys = {
        split: {e.key for e in itertools.islice(draws(task, split, 0), 600)} for split in SPLITS
    }
    assert all(split_of(key) == split for split, some in keys.items() for key in some)
    assert not keys["train"] & keys["test"] and not keys["train"] & keys["dev"]
    assert len(keys["test"]) == 600
    first = [e.key for e in itertools.islice(draws(task, "test", 0), 50)]
    assert first == [e.key for e in itertools.islice(draws(task, "test", 0), 50)]


def test_more_problems_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is said, and does not go on for ever."""
    monkeypatch.setattr(corpus, "FRUITLESS", 500)
    there = len(list(draws("brief", "dev", 0)))
    with pytest.raises(DinferError, match=f"2000 problems .* dev split of brief has {there}"):
        first_of("brief", "dev", 0, 2000)
    assert len(first_of("brief", "dev", 0, there)) == there


def test_unknown_task_and_split() -> None:
    with pytest.raises(DinferError, match="Unknown task 'maths'"):
        next(draws("maths", "test", 0))
    with pytest.raises(DinferError, match="Unknown split 'tests'"):
        next(draws("math", "tests", 0))


def batch() -> list[Ids]:
    return [
        Ids([5, 6, 7, 8, 9], [10, 11, 12, 13, 3], [1.0] * 5, [False] * 5),
        Ids([5, 6, 7], [20, 21, 3], [1.0] * 3, [True] * 3),
    ]


@pytest.mark.parametrize(("block", "all_masked"), [(4, False), (2, True), (1, True)])
def test_block_causal_batch(block: int, all_masked: bool) -> None:
    """Each answer token is a target once, behind a mask; a noisy row sees clean earlier blocks and
    its own.
    """
    noised = block_causal_batch(batch(), block, 1, 0, torch.Generator().manual_seed(0), all_masked)
    weighted = noised.weights_BT > 0
    assert (noised.tokens_BT[weighted] == 1).all()
    for row, ids in enumerate(batch()):
        chosen = weighted[row] & (noised.weights_BT[row] == 1.0)
        places = noised.positions_T[chosen].tolist()
        assert sorted(places) == list(range(len(ids.prompt), len(ids.prompt) + len(ids.answer)))
        by_place = dict(zip(places, noised.targets_BT[row][chosen].tolist(), strict=True))
        assert [by_place[p] for p in sorted(places)] == ids.answer
    assert noised.visible_TT is not None
    length = int(noised.positions_T.max()) + 1
    numbers = noised.positions_T // block
    for row in range(length, len(numbers)):
        seen = noised.visible_TT[row].nonzero().squeeze(1)
        clean, own = seen[seen < length], seen[seen >= length]
        assert (numbers[clean] < numbers[row]).all() and len(clean) == numbers[row] * block
        assert (numbers[own] == numbers[row]).all() and row in own


def test_one_prompt_is_one_block() -> None:
    """Clean rows before the first noisy block see one another; all else is as without."""
    plain, whole = (
        block_causal_batch(batch()[:1], 2, 1, 0, torch.Generator(), one_prompt=one)
        for one in (False, True)
    )
    assert plain.visible_TT is not None and whole.visible_TT is not None
    start = 4  # the prompt of 5 ends in the third block, which holds a part of the answer
    assert not plain.visible_TT[:start, :start].all()
    assert whole.visible_TT[:start, :start].all() and not whole.visible_TT[:start, start:].any()
    assert torch.equal(plain.visible_TT[start:], whole.visible_TT[start:])


def test_bidirectional_batch() -> None:
    """Only the answer is masked, prompts never; both copies together mask every place of an open
    row.
    """
    noised = bidirectional_batch(batch(), 4, 1, 0, torch.Generator().manual_seed(0))
    assert len(noised.tokens_BT) == 4
    for row, ids in enumerate(batch() * 2):
        start = len(ids.prompt)
        assert noised.tokens_BT[row, :start].tolist() == ids.prompt
        assert noised.weights_BT[row, :start].sum() == 0
        assert ((noised.tokens_BT[row] == 1) == (noised.weights_BT[row] > 0)).all()


def test_noisy_rows_of_the_training_layout_equal_inference(models: dict) -> None:
    """A noisy block in the three-copy layout gives the logits of the same canvas run as at
    inference.
    """
    model = models["sdar"].model
    noised = block_causal_batch(batch()[:1], 4, 311, 305, torch.Generator().manual_seed(3))
    positions, tokens = noised.positions_T, noised.tokens_BT[0]
    length = int(positions.max()) + 1
    with torch.no_grad():
        rows = model(model.embed(tokens), positions, dense_attention(1, noised.visible_TT))
        start = int(positions[length])
        second = length + (length - start)
        for place in range(start, length, 4):
            noisy = tokens[length + place - start : length + place - start + 4]
            canvas = torch.cat((tokens[:place], noisy))
            number = torch.arange(len(canvas)) // 4
            plain = model(
                model.embed(canvas),
                torch.arange(len(canvas)),
                dense_attention(1, number[None, :] <= number[:, None]),
            )
            found = rows[length + place - start : length + place - start + 4]
            torch.testing.assert_close(found, plain[-4:], atol=1e-4, rtol=1e-4)
    assert second < len(tokens)


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8)])
def test_orthogonalise(shape: tuple[int, int, int]) -> None:
    """Singular values come near 1 and the singular vectors stay."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalise(x))
    assert values.min() > 0.5 and values.max() < 1.5
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    core = u.mT @ orthogonalise(x) @ v.mT
    assert (core - torch.diag_embed(core.diagonal(dim1=1, dim2=2))).abs().max() < 1e-3


def test_plain_attention_is_the_fused_one() -> None:
    """What runs on a CPU equals torch's own operation, with and without a mask."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2 * 7, 4, 8)
    for visible in (None, torch.rand(7, 7) < 0.5):
        if visible is not None:
            visible.fill_diagonal_(True)
        found = dense_attention(2, visible)(0, q, k, v)
        heads = [x.view(2, 7, 4, 8).transpose(1, 2) for x in (q, k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=visible)
        torch.testing.assert_close(found, wanted.transpose(1, 2).flatten(0, 1))


def test_a_grown_model_begins_as_the_one_it_comes_from() -> None:
    """More layers and tokens change no hidden row of text that both spell alike, and no logit of
    a token that both have; a new token is the mean of its pieces.
    """
    from dataclasses import replace

    from dinfer.train import run as module

    recipes = [
        replace(
            RECIPES["tiny-sdar"],
            config={**RECIPES["tiny-sdar"].config, "num_hidden_layers": layers, "vocab_size": size},
        )
        for layers, size in ((1, 300), (2, 400))
    ]
    source, target = (module.new_model(recipe, 3)[1] for recipe in recipes)
    old, new = (make_tokenizer(0, size, ("words", "tables")) for size in (300, 400))
    grow(source, old, target, new)
    text = [token for token in ("T", "o", "m", "Ġ", "h", "a", "s", "3") if old.token_to_id(token)]
    hidden = [
        model(
            model.embed(torch.tensor([tokenizer.token_to_id(x) for x in text])),
            torch.arange(len(text)),
            dense_attention(1, None),
        )
        for model, tokenizer in ((source, old), (target, new))
    ]
    torch.testing.assert_close(hidden[0], hidden[1])
    shared = [x for x in new.get_vocab() if old.token_to_id(x) is not None]
    logits = [
        torch.nn.functional.linear(rows, model.head.weight)[:, [t.token_to_id(x) for x in shared]]
        for rows, model, t in zip(hidden, (source, target), (old, new), strict=True)
    ]
    torch.testing.assert_close(logits[0], logits[1])
    fresh = next(x for x in new.get_vocab() if old.token_to_id(x) is None)
    pieces = old.encode(new.decode([new.token_to_id(fresh)])).ids
    torch.testing.assert_close(
        target.embedding.weight[new.token_to_id(fresh)], source.embedding.weight[pieces].mean(dim=0)
    )


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada", "tiny-words"])
def test_training_resumes_where_it_stopped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps in one go, and one step twice, end with the same weights; the export loads."""
    from dataclasses import replace

    from dinfer.train import run as module

    small = dict.fromkeys(RECIPES[name].parts, 1)
    monkeypatch.setitem(module.RECIPES, name, replace(module.RECIPES[name], **small))
    monkeypatch.setattr(module, "POOL", 2)

    def quiet(step: int, total: int, loss: float, seconds: float) -> None:
        assert 0 < loss < 20

    train_bundled(name, TrainOptions(tmp_path / "a", 3, 2, device="cpu"), quiet)
    state = tmp_path / "b"
    state.mkdir()
    _family, model = module.new_model(replace(module.RECIPES[name], steps=2), 3)
    halted = module.Run(replace(module.RECIPES[name], steps=2), model, 3, "cpu", torch.float32)

    class Halt(Exception):
        pass

    def stop(step: int, loss: float, seconds: float) -> None:
        halted.save(state / "state.pt")
        raise Halt

    with pytest.raises(Halt):
        halted.train(stop)
    train_bundled(name, TrainOptions(state, 3, 2, device="cpu"), quiet)
    a, b = load(str(tmp_path / "a" / "model")), load(str(state / "model"))
    for (key, left), (_, right) in zip(
        a.model.named_parameters(), b.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(left, right, msg=key)
    assert a.tokenizer is not None and a.template is not None
    assert isinstance(next(draws("brief", "dev", 0)), Brief)


def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from dinfer.train import run as module

    small = replace(module.RECIPES["tiny-sdar"], math=2, brief=1, drill=1, own=2)
    monkeypatch.setitem(module.RECIPES, "tiny-sdar", small)
    monkeypatch.setattr(module, "POOL", 2)


def test_ctrl_c_ends_the_step_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state holds whole steps, and the run can be taken up again."""
    _tiny(monkeypatch)
    steps = []
    before = signal.getsignal(signal.SIGINT)  # a job in the background may ignore it

    def press(step: int, total: int, loss: float, seconds: float) -> None:
        steps.append(step)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    options = TrainOptions(tmp_path, 3, 2, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train_bundled("tiny-sdar", options, press)
    assert steps == [1] and torch.load(tmp_path / "state.pt")["step"] == 1
    assert signal.getsignal(signal.SIGINT) is before
    train_bundled("tiny-sdar", options, press)
    assert steps == [1, 2]


def test_own_examples_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has a batch of them, and they all come in turn."""
    _tiny(monkeypatch)
    file = tmp_path / "own.jsonl"
    lines = [{"prompt": f"Say {n}.", "answer": f"It is {n}."} for n in range(4)]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    examples = read_examples(file)
    assert [e.answer for e in examples] == ["It is 0.", "It is 1.", "It is 2.", "It is 3."]
    stream = endless(examples, 0)
    assert all(
        {e.prompt for e in itertools.islice(stream, 4)} == {e.prompt for e in examples}
        for _ in range(3)
    )
    weights = []
    for data in (None, file):
        options = TrainOptions(tmp_path / str(data is None), 3, 1, device="cpu", data=data)
        folder = train_bundled("tiny-sdar", options, lambda *_: None)
        weights.append(load_file(folder / "model.safetensors"))
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "--data" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}', "own.jsonl:2: a line must be"),
        ('["a", "b"]', "own.jsonl:1: a line must be"),
        ("no json", "own.jsonl:1: a line must be"),
        ("\n", "has no examples"),
        (json.dumps({"prompt": "7" * 600, "answer": "b"}), "begins '777.* tokens; the models take"),
    ],
)
def test_bad_data_files(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tiny(monkeypatch)
    file = tmp_path / "own.jsonl"
    file.write_text(text, encoding="utf-8")
    options = TrainOptions(tmp_path / "run", 0, 1, device="cpu", data=file)
    with pytest.raises(DinferError, match=message):
        train_bundled("tiny-sdar", options, lambda *_: None)
    with pytest.raises(DinferError, match="no such file"):
        read_examples(tmp_path / "none.jsonl")

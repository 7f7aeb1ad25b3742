"""Watches a canvas fill in: what each step sets, how sure it is, and the text that is settled."""

from dinfer import LLM, CanvasEvent, SamplingParams

llm = LLM("tiny-sdar")
problem = "Tom has 12 apples. Then he buys 7 more. How many apples does Tom have now?"
for event in llm.stream(problem, SamplingParams(max_tokens=64)):
    if isinstance(event, CanvasEvent):
        tokens = zip(event.positions, event.token_ids, event.confidence, strict=True)
        shown = [f"{place}:{llm.tokenizer.decode([t])!r} {sure:.2f}" for place, t, sure in tokens]
        print(f"forward {event.step} sets", ", ".join(shown))
    elif event.text:
        print("settled:", repr(event.text))

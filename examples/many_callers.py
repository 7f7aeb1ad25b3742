"""Many asyncio callers on one engine: whoever is done first is answered first."""

import asyncio

from dinfer import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, apples: int) -> None:
    problem = f"Tom has {apples} apples. Then he buys 7 more. How many apples does Tom have now?"
    (output,) = await llm.generate(problem, SamplingParams(max_tokens=64))
    print(apples, "->", output.text.splitlines()[-1])


async def main() -> None:
    llm = AsyncLLM("tiny-sdar")
    await asyncio.gather(*(ask(llm, apples) for apples in range(10, 26)))
    llm.close()


asyncio.run(main())

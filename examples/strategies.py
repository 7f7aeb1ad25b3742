"""The same problems under several strategies in one batch: forwards and tokens per forward."""

from dinfer import LLM, SamplingParams

SPECS = ["fixed", "threshold:threshold=0.9", "factor", "entropy:bound=0.1", "klass", "edit"]

llm = LLM("tiny-sdar")
problem = "Mia has 20 books. Then she gives 6 to Tom. How many books does Mia have now?"
params = [SamplingParams(max_tokens=64, decoder=spec) for spec in SPECS]
for spec, output in zip(SPECS, llm.generate([problem] * len(SPECS), params), strict=True):
    stats = output.stats
    print(
        f"{spec:24} {stats.forward_passes:3} forwards, {stats.tokens_per_forward:.1f} tokens each,"
    )
    print(f"{'':24} {output.text.splitlines()[-1]}")

"""What the model thought: the best tokens at each place of an answer, and how likely a text is.

python examples/logprobs.py --model models/gemma-3-270m.toml --mesh mesh_configs/1p1d-cpu.toml
"""

import argparse
import math

import jpd


def alternatives(server: jpd.Server, prompt: str) -> list[tuple[int, float]]:
    """For each token of a greedy answer: its id, and how likely the model found it."""
    [answer] = server.generate(prompt, max_tokens=8, temperature=0.0, logprobs=3)
    chosen = []
    for token_id, seen in zip(answer.token_ids, answer.logprobs, strict=True):
        chosen.append((token_id, math.exp(seen.logprob)))
        best = zip(seen.top_token_ids, seen.top_logprobs, strict=True)
        others = ", ".join(f"{other} {math.exp(logprob):.1%}" for other, logprob in best)
        print(f"token {token_id}, number {seen.rank} of the model's; best: {others}")
    return chosen


def perplexity(server: jpd.Server, text: str) -> float:
    """Of a text under the model, from the log-probabilities of its own tokens."""
    [answer] = server.generate(text, max_tokens=1, prompt_logprobs=0)
    known = [seen.logprob for seen in answer.prompt_logprobs if seen is not None]
    return math.exp(-sum(known) / len(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/gemma-3-270m.toml")
    parser.add_argument("--mesh", default="mesh_configs/1p1d-cpu.toml")
    options = parser.parse_args()
    with jpd.launch(model=options.model, mesh=options.mesh) as server:
        alternatives(server, "The capital of France is")
        print(f"perplexity {perplexity(server, 'The capital of France is Paris.'):.1f}")


if __name__ == "__main__":
    main()

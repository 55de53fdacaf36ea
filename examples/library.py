"""Many prompts through one engine, from Python: `python examples/library.py`."""

from batchwright import Engine, SamplingParams

QUESTIONS = [
    "What are the three primary colours?",
    "Name one thing that floats and one that sinks.",
    "Which day of the year is the shortest?",
]


def main() -> None:
    engine = Engine("smollm2-135m")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    responses = engine.generate(chats, SamplingParams(max_tokens=32, temperature=0))
    for question, response in zip(QUESTIONS, responses, strict=True):
        if response.error is not None:
            print(f"{question}\n  failed: {response.error}\n")
            continue
        print(f"{question}\n  {response.output.strip()}")
        print(f"  ({response.tokens_generated} tokens, {response.finish_reason}, {response.latency_ms:.0f} ms)\n")
    stats = engine.stats
    print(f"{stats.generated_tokens} tokens in {stats.steps} steps, {stats.occupancy_mean:.1f} sequences in a step")
    engine.close()


if __name__ == "__main__":
    main()

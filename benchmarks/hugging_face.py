"""Time and memory of a step with hypergradients through LoRA adapters, beside plain fine-tuning of the same adapters.

python -m benchmarks.hugging_face            a table, in a minute on one core; needs pip install 'mlotool[peft]'

Each line is a process of its own. A tick is one step of the adapters, and but for plain fine-tuning one of the shares
above them. Time is that of the processor, the least of several ticks; memory is the peak of the process above what it
takes before its first tick.
"""

import json
import resource
import subprocess
import sys
import time

MODEL = "{model_type: gpt2, n_embd: 256, n_layer: 4, n_head: 4, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"
LINES = {
    "plain fine-tuning": [],
    "finite_difference": ["hypergradient=finite_difference", "~hypergradient.horizon"],
    "cg, 5 iterations": ["hypergradient=cg", "~hypergradient.horizon"],
    "unrolled, one step": [],
    "unrolled, one step, remat": ["problems.model.remat=auto", "hypergradient.product=forward"],
}
NUM_TICKS = 6


def measure(name: str) -> tuple[float, float]:
    """Return the seconds of a tick and the MiB at its peak."""
    from mlotool.config import build, compose
    from mlotool.program import Schedule

    words = ["data.sizes={train: 400, meta: 40, val: 8, test: 8}", f"problems.model.module.config={MODEL}"]
    if name == "plain fine-tuning":
        words += ["model@problems.model.module=pretrained_causal", "data=python_text"]
        words += ["problems.model.module.lora={r: 8, lora_alpha: 16, target_modules: all-linear}"]
        program = build(compose("lm_plain", words)).program
    else:
        program = build(
            compose("lm_lora_data_mixture", [*words, "problems.model.unroll_steps=1", *LINES[name]])
        ).program
    schedule, seconds = Schedule(program), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(NUM_TICKS):
        begin = time.process_time()
        schedule.tick()
        seconds.append(time.process_time() - begin)
    return min(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print the table."""
    rows = {}
    for name in LINES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.hugging_face", name]
        rows[name] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[-2]
        )
    plain_s, plain_mib = rows["plain fine-tuning"]
    print("| | time of a tick | peak memory |\n|---|---|---|")
    for name, (seconds, mib) in rows.items():
        print(f"| {name} | {seconds / plain_s:.1f} ({seconds:.2f} s) | {mib / plain_mib:.1f} ({mib:.0f} MiB) |")


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]))) if len(sys.argv) > 1 else main()

"""The engine on a CUDA device: precision of float32, TF32 and bf16 against float64, then tokens a second per direction.

Written for a short loan of a machine: the result file is rewritten after every measurement, a case that runs out of
memory is recorded as such, and no case is begun once the minutes are used up. ``--device cpu --tiny`` rehearses it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hvpflow.curvature.quadratic import make_engine
from hvpflow.curvature.reference import hessian_form, jvp_of_grad
from hvpflow.models.config import LlamaConfig
from hvpflow.models.llama import Llama

PRECISIONS = ("tf32", "bf16", "float32")


def build(config: LlamaConfig, device: str, dtype: torch.dtype) -> Llama:
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(device, dtype).eval()


def batch(config: LlamaConfig, sequences: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, sequences, config.context_length)
    tokens, targets = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    return tokens, targets


def signs(model: Llama, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: (torch.randint(0, 2, (count, *p.shape), generator=generator, dtype=torch.int8) * 2 - 1).to(p)
        for name, p in model.named_parameters()
    }


def set_precision(name: str) -> bool:
    """Switch TF32; return whether matrix products run in bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return name == "bf16"


def correctness(config: LlamaConfig, device: str) -> dict:
    """Differences from float64 `jvp(grad)` on one sequence, relative to the larger of vᵀHv and its GN part."""
    exact = build(config, device, torch.float64)
    tokens, targets = batch(config, 1, device)
    directions = signs(exact, 2)
    expected = jvp_of_grad(exact, tokens, targets, directions)
    scale = torch.maximum(expected.total.abs(), expected.gauss_newton.abs())

    def difference(forms: tuple[Tensor, Tensor]) -> list[float]:
        return [float(((mine - theirs).abs() / scale).max()) for mine, theirs in zip(forms, expected)]

    result = {"float64": difference(make_engine(exact, (tokens, targets))(tokens, targets, directions))}
    del exact
    single = build(config, device, torch.float32)
    directions = {name: stack.float() for name, stack in directions.items()}
    for name in PRECISIONS:
        amp = set_precision(name)
        for compiled in (False, True):
            engine = make_engine(single, (tokens, targets), amp=amp, compile_rules=compiled)
            key = f"{name}, compiled rules" if compiled else name
            try:
                result[key] = difference(engine(tokens, targets, directions))
            except Exception as problem:
                result[key] = f"{type(problem).__name__}: {str(problem)[:300]}"
    return result


def measure(run: Callable[[], object], device: str, tokens: int, directions: int, repeats: int) -> dict:
    """Median seconds, tokens a second per direction, peak bytes above what was allocated, seconds of the first call."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    samples = []
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    seconds = statistics.median(samples[2:])
    return {
        "first_call_seconds": samples[0],
        "seconds_per_direction": seconds / directions,
        "tokens_per_second_per_direction": tokens * directions / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to rehearse the script")
    options = parser.parse_args()
    device, began = options.device, time.perf_counter()
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing measured")
    config = LlamaConfig()  # the 20 M-parameter preset, context 1024
    sequences, stacks = (32, 64), (8, 4, 16)
    if options.tiny:
        config = LlamaConfig(vocab_size=256, layers=2, width=32, heads=2, ffn_width=64, context_length=32)
        sequences, stacks = (2,), (2,)
    result: dict = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parameters": config.num_parameters,
        "context_length": config.context_length,
        "cases": [],
    }

    def note() -> None:
        options.json.write_text(json.dumps(result, indent=1))

    result["correctness"] = correctness(config, device)
    note()
    model = build(config, device, torch.float32)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    cases = [("hvpflow", p, B, K) for B in sequences for p in PRECISIONS[:2] for K in stacks]
    cases += [("jvp-grad-compiled", p, B, 1) for B in sequences[:1] for p in PRECISIONS[:2]]
    for method, precision, B, K in cases:
        case = {"method": method, "precision": precision, "sequences": B, "directions": K}
        result["cases"].append(case)
        if time.perf_counter() - began > 60 * options.minutes:
            case["skipped"] = "the minutes are used up"
            continue
        amp = set_precision(precision)
        tokens, targets = batch(config, B, device)
        try:
            directions = signs(model, K)
            if method == "hvpflow":
                engine = make_engine(model, (tokens, targets), amp=amp, compile_rules=device == "cuda")
                case |= measure(lambda: engine(tokens, targets, directions), device, tokens.numel(), K, 3)  # noqa: B023
            else:
                form = hessian_form(model, compiled=True)
                single = {name: stack[0] for name, stack in directions.items()}

                def run() -> Tensor:
                    with sdpa_kernel(SDPBackend.MATH), torch.autocast(device, torch.bfloat16, amp, False):  # noqa: B023
                        return form(parameters, single, tokens, targets)  # noqa: B023

                case |= measure(run, device, tokens.numel(), 1, 3)
        except Exception as problem:
            case["failed"] = f"{type(problem).__name__}: {str(problem)[:300]}"
        note()
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()

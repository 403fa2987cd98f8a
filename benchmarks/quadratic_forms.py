"""Seconds and memory per curvature form vᵀHv: this package beside the ways others compute it.

    python benchmarks/quadratic_forms.py --quick --json FILE      the small model, under two minutes
    python benchmarks/quadratic_forms.py --json FILE --plot FILE  all sizes

Every method computes vᵀHv of the same summed loss, batch and directions, and is checked against the first one. Times
are taken in one process, all methods in turn in every round, so that a slow moment of the machine meets them all; the
median counts. The peak memory of a method is that of its own process: resident memory above what the process held,
warmed up and with the weights loaded, before the directions were made (on CUDA: what PyTorch allocated).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hvpflow.curvature.quadratic import TaylorEngine, make_engine
from hvpflow.curvature.reference import hessian_form
from hvpflow.models.config import LlamaConfig
from hvpflow.models.llama import Llama

SIZES = {  # model, sequences, tokens in each
    "small": (
        LlamaConfig(vocab_size=2048, layers=2, width=128, heads=4, ffn_width=384, context_length=128),
        8,
        128,
    ),
    "20m-256": (LlamaConfig(context_length=256), 8, 256),
    "20m-1024": (LlamaConfig(), 2, 1024),
}
Directions = dict[str, Tensor]
Method = Callable[[Directions], Tensor]
"""Directions -> [K] forms."""


class Logits(nn.Module):
    """The model as peers want it: tokens -> logits with the classes on axis 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).transpose(1, 2)


def _ours(model: nn.Module, tokens: Tensor, targets: Tensor, *, compile_rules: bool = False) -> Method:
    engine = make_engine(model, (tokens, targets), compile_rules=compile_rules)
    return lambda directions: engine(tokens, targets, directions).total


def _ours_compiled(model: nn.Module, tokens: Tensor, targets: Tensor) -> Method:
    return _ours(model, tokens, targets, compile_rules=True)


def _ours_three_products(model: nn.Module, tokens: Tensor, targets: Tensor) -> Method:
    engine = TaylorEngine(model, (tokens, targets), paired_width=1 << 30)
    return lambda directions: engine(tokens, targets, directions).total


def _one_by_one(product: Callable[[dict[str, Tensor]], Tensor]) -> Method:
    def run(directions: Directions) -> Tensor:
        count = len(next(iter(directions.values())))
        with sdpa_kernel(SDPBackend.MATH):
            return torch.stack([product({n: d[k] for n, d in directions.items()}).cpu() for k in range(count)])

    return run


def _jvp_grad(model: nn.Module, tokens: Tensor, targets: Tensor, *, compiled: bool = False) -> Method:
    form = hessian_form(model, compiled=compiled)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _one_by_one(lambda direction: form(parameters, direction, tokens, targets))


def _jvp_grad_compiled(model: nn.Module, tokens: Tensor, targets: Tensor) -> Method:
    return _jvp_grad(model, tokens, targets, compiled=True)


def _double_backward(model: nn.Module, tokens: Tensor, targets: Tensor) -> Method:
    parameters = dict(model.named_parameters())

    def form(direction: dict[str, Tensor]) -> Tensor:
        gradients = torch.autograd.grad(model(tokens, targets), list(parameters.values()), create_graph=True)
        slope = sum((g * direction[n]).sum() for n, g in zip(parameters, gradients))
        products = torch.autograd.grad(slope, list(parameters.values()))
        return sum((p.double() * direction[n].double()).sum() for n, p in zip(parameters, products))

    return _one_by_one(form)


def _curvlinops(model: nn.Module, tokens: Tensor, targets: Tensor) -> Method:
    from curvlinops import HessianLinearOperator

    wrapped = Logits(model)
    parameters = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):
        hessian = HessianLinearOperator(
            wrapped,
            nn.CrossEntropyLoss(reduction="sum"),
            list(parameters.values()),
            [(tokens, targets)],
            check_deterministic=False,
        )

    def form(direction: dict[str, Tensor]) -> Tensor:
        v = torch.cat([direction[name.removeprefix("model.")].flatten() for name in parameters])
        return (v.double() * (hessian @ v).double()).sum()

    return _one_by_one(form)


def _eigenthings(model: nn.Module, tokens: Tensor, targets: Tensor) -> Method:
    from hessian_eigenthings import HessianOperator

    names = [name for name, _ in model.named_parameters()]
    hessian = HessianOperator(model, [(tokens, targets)], lambda module, batch: module(*batch))

    def form(direction: dict[str, Tensor]) -> Tensor:
        v = torch.cat([direction[name].flatten() for name in names])
        return (v.double() * hessian.matvec(v).double()).sum()

    return _one_by_one(form)


METHODS: dict[str, tuple[Callable[..., Method], int]] = {  # name -> (builder, directions at once)
    "hvpflow": (_ours, 8),
    "hvpflow-K1": (_ours, 1),
    "hvpflow-K4": (_ours, 4),
    "hvpflow-K16": (_ours, 16),
    "hvpflow-compiled-rules": (_ours_compiled, 8),
    "hvpflow-three-products": (_ours_three_products, 8),
    "jvp-grad-compiled": (_jvp_grad_compiled, 1),
    "jvp-grad": (_jvp_grad, 1),
    "double-backward": (_double_backward, 1),
    "curvlinops": (_curvlinops, 1),
    "hessian-eigenthings": (_eigenthings, 1),
}
QUICK = ["hvpflow", "hvpflow-K1", "jvp-grad-compiled", "jvp-grad", "double-backward"]
PACKAGES = {"curvlinops": "curvlinops", "hessian-eigenthings": "hessian_eigenthings"}


def build(size: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    config, sequences, length = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    model = Llama(config)
    model.init_weights(generator)
    tokens, targets = torch.randint(config.vocab_size, (2, sequences, length), generator=generator).to(device)
    return model.to(device).eval(), tokens, targets


def signs(model: nn.Module, count: int) -> Directions:
    """Rademacher directions; the k-th is the same however many there are."""
    stacks: Directions = {name: p.new_empty(count, *p.shape) for name, p in model.named_parameters()}
    for k in range(count):
        generator = torch.Generator().manual_seed(k)
        for stack in stacks.values():
            drawn = torch.randint(0, 2, stack.shape[1:], generator=generator, dtype=torch.int8)
            stack[k] = drawn.to(stack.device, stack.dtype) * 2 - 1
    return stacks


def usable(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split the methods into those that can run and those that cannot, with the reason."""
    missing = {}
    for name in names:
        if name in PACKAGES:
            try:
                __import__(PACKAGES[name])
            except ImportError as problem:
                missing[name] = f"not installed: {problem}"
    return [name for name in names if name not in missing], missing


def time_methods(size: str, names: list[str], device: str, rounds: int, seconds: float) -> dict[str, dict]:
    """Interleaved timing; at least three rounds, then until ``rounds`` or ``seconds`` are used up."""
    model, tokens, targets = build(size, device)
    stacks = {count: signs(model, count) for count in {METHODS[name][1] for name in names}}
    prepared, results = {}, {}
    expected: Tensor | None = None
    for name in names:
        maker, count = METHODS[name]
        start = time.perf_counter()
        try:
            prepared[name] = maker(model, tokens, targets)
            forms = prepared[name](stacks[count]).cpu()
        except Exception as problem:
            prepared.pop(name, None)
            results[name] = {"failed": f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"}
            continue
        expected = forms[:1] if expected is None else expected
        results[name] = {
            "directions": count,
            "start_up_seconds": time.perf_counter() - start,
            "relative_difference": float(((forms[:1] - expected) / expected).abs()),
            "samples": [],
            "cpu_samples": [],
        }
    began = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - began > seconds:
            break
        for name, method in prepared.items():
            count = METHODS[name][1]
            _wait(device)
            start, cpu_start = time.perf_counter(), time.process_time()
            method(stacks[count])
            _wait(device)
            results[name]["samples"].append((time.perf_counter() - start) / count)
            results[name]["cpu_samples"].append((time.process_time() - cpu_start) / count)
    for name in prepared:
        results[name]["cpu_seconds_per_direction"] = statistics.median(results[name]["cpu_samples"])
        results[name]["seconds_per_direction"] = statistics.median(results[name]["samples"])
    return results


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system reports no {key}; memory is measured on Linux")


def _release() -> None:
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def measure_memory(size: str, name: str, device: str) -> int:
    """Peak bytes of one method in this process: see the module's text."""
    model, tokens, targets = build(size, device)
    maker, count = METHODS[name]
    method = maker(model, tokens, targets)
    method(signs(model, count))
    _release()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method(signs(model, count))
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    method(signs(model, count))
    return _resident("VmHWM") - before


def memory_in_own_process(size: str, name: str, device: str) -> int | str:
    command = [sys.executable, __file__, "--memory-of", name, "--sizes", size, "--device", device]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        return (finished.stderr.strip().splitlines() or ["no message"])[-1]
    return int(finished.stdout.strip().splitlines()[-1])


def environment(device: str) -> dict:
    model = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    packages = {}
    for package in ("torch", "numpy", "hvpflow", "curvlinops-for-pytorch", "hessian-eigenthings"):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else model,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.system(),
        "dtype": "float32",
        "packages": packages,
    }


def table(name: str, methods: dict[str, dict]) -> str:
    """A Markdown table of one size."""
    base = methods.get("jvp-grad-compiled", {}).get("seconds_per_direction")
    lines = [
        f"### {name}",
        "",
        "| method | K | ms per direction | speed, compiled `jvp(grad)` = 1 | peak MB | relative difference |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, result in methods.items():
        if "seconds_per_direction" not in result:
            lines.append(f"| {method} | | {result.get('failed', 'not run')} | | | |")
            continue
        seconds, peak = result["seconds_per_direction"], result["peak_bytes"]
        speed = f"{base / seconds:.2f}" if base else ""
        memory = f"{peak / 1e6:.0f}" if isinstance(peak, int) else str(peak)
        lines.append(
            f"| {method} | {result['directions']} | {seconds * 1e3:.1f} | {speed} | {memory} | "
            f"{result['relative_difference']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def plot(sizes: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(sizes), figsize=(4.2 * len(sizes), 6), squeeze=False, layout="constrained")
    for column, (size, record) in enumerate(sizes.items()):
        methods = {n: r for n, r in record["methods"].items() if "seconds_per_direction" in r}
        colours = ["#3b6ea5" if n.startswith("hvpflow") else "#b5b5b5" for n in methods]
        for row, (key, factor, label) in enumerate(
            (("seconds_per_direction", 1e3, "ms per direction"), ("peak_bytes", 1e-6, "peak memory, MB"))
        ):
            values = [r[key] * factor if not isinstance(r[key], str) else 0 for r in methods.values()]
            axes[row, column].barh(list(methods), values, color=colours)
            axes[row, column].invert_yaxis()
            axes[row, column].set_xlabel(label)
        axes[0, column].set_title(size)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small size and the main methods")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds at most (at least 3)")
    parser.add_argument("--seconds", type=float, default=120, help="stop adding rounds to a size after this long")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--table", type=Path, help="where to write them as Markdown tables")
    parser.add_argument("--plot", type=Path, help="where to draw them (SVG, PNG or PDF)")
    parser.add_argument("--memory-of", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(measure_memory(options.sizes[0], options.memory_of, options.device))
        return
    sizes = ["small"] if options.quick else options.sizes
    names, missing = usable(QUICK if options.quick else options.methods)
    described = environment(options.device)
    records = {}
    for size in sizes:
        config, sequences, length = SIZES[size]
        methods = time_methods(size, names, options.device, options.rounds, 20 if options.quick else options.seconds)
        for name, result in methods.items():
            if "failed" not in result:
                result["peak_bytes"] = memory_in_own_process(size, name, options.device)
        methods |= {name: {"failed": reason} for name, reason in missing.items()}
        records[size] = {
            "parameters": config.num_parameters,
            "sequences": sequences,
            "length": length,
            "methods": methods,
        }
        print(table(size, methods), flush=True)
    if options.json:
        first = records[sizes[0]]["methods"]
        options.json.write_text(json.dumps({"environment": described, "methods": first, "sizes": records}, indent=1))
    if options.table:
        options.table.write_text("\n".join(table(size, record["methods"]) for size, record in records.items()))
    if options.plot:
        plot(records, options.plot)


if __name__ == "__main__":
    main()

"""``dlinfer preflight``: can LMDeploy serve this model folder here? With what kernels, and with how much memory?"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dlinfer.framework.lmdeploy_ext.preflight.check import Memory, Report

EXIT = (
    "Exit status: 0 if the folder can be served with these options, 1 if something is refused or does not fit, "
    "else 2."
)
_OPTIONS: dict[str, tuple[Any, str]] = {
    "dtype": (str, "auto, float32, float16 or bfloat16"),
    "block_size": (int, "tokens in one block of the KV cache"),
    "session_len": (int, "maximum number of tokens in one sequence"),
    "max_batch_size": (int, "maximum number of sequences in one batch"),
    "max_prefill_token_num": (int, "maximum number of tokens in one prefill"),
    "cache_max_entry_count": (float, "fraction of the free memory to use for the KV cache"),
    "num_gpu_blocks": (int, "number of blocks of the KV cache"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command. An option that the user does not give keeps PytorchEngineConfig's default."""
    parser.add_argument(
        "folder",
        metavar="MODEL",
        type=Path,
        help="model folder in the format of Hugging Face, or a GGUF file",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="device type (default cpu)")
    for name, (kind, text) in _OPTIONS.items():
        metavar = "DTYPE" if name == "dtype" else "N"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the folder's own configuration code, if it has any",
    )
    parser.add_argument("--eager-mode", action="store_true", help="plan for a run without compiled graphs")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (schema: docs/reference/json.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
    except ImportError as error:
        sys.stderr.write(f"error: LMDeploy cannot be imported: {error}\n")
        return 2
    options = {name: getattr(arguments, name) for name in (*_OPTIONS, "eager_mode", "trust_remote_code")}
    report = preflight(arguments.folder, arguments.device, **options)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        show(report)
    return 0 if report.fits else 1


def show(report: "Report", console: Console | None = None) -> None:
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=500, no_color=True)
    table = _table("model")
    table.add_row("folder", Text(report.folder))
    table.add_row("architecture", ", ".join(report.architectures) or "none named")
    for label, text in (
        ("class", report.model_class),
        ("dtype", report.dtype),
        ("quantisation", report.quantisation),
        ("plain torch", ", ".join(report.plain)),
    ):
        if text:
            table.add_row(label, text)
    console.print(table)
    if report.ops:
        ops = _table("ops", "op", "kernel of", "")
        for op in report.ops:
            style = "yellow" if op.reason else "green"
            ops.add_row(op.op, Text(op.vendor, style=style), Text(op.reason))
        console.print(ops)
    if report.memory is not None:
        console.print(_memory(report.memory))
    for refusal in report.refusals:
        console.print(Text(f"{refusal.error}: {refusal.text} Next step: {refusal.next_step}", style="red"))
    verdict = "PASS: it can be served" if report.fits else "FAIL: it cannot be served"
    console.print(Text(verdict, style="green" if report.fits else "red"))


def _memory(plan: "Memory") -> Table:
    table = _table("memory")
    table.add_row("process", _gib(plan.process), "Python, torch and LMDeploy, without a model")
    table.add_row("graphs", _gib(plan.graphs), "the compiler and its compiled graphs; none in eager mode")
    table.add_row("weights", _gib(plan.weights), f"{_gib(plan.stored)} in the checkpoint's files")
    what = f"{plan.kv_blocks} blocks of {plan.block_size} tokens, {plan.kv_token} bytes per token"
    table.add_row("KV cache", _gib(plan.kv_cache), what)
    table.add_row("activations", _gib(plan.activations), f"for a prefill of {plan.prefill_tokens} tokens")
    table.add_row("logits", _gib(plan.logits), "for a full batch, with the tensors that sampling needs")
    table.add_row(
        "peak", _gib(plan.peak), f"up to {_gib(plan.mapped)} of it are mapped file pages while weights load"
    )
    table.add_row("needs", _gib(plan.needed), f"{_gib(plan.free)} are free ({plan.source})")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", show_header=bool(columns), box=None, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(column)
    return table


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"

"""`flashspec bench verify`: one verification by shape, Triton against PyTorch eager and compiled, with the memory floor beside them."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from flashspec.bench import baselines
from flashspec.sampling import SamplingParams
from flashspec.verifiers import reason_without_triton
from flashspec.verifiers.base import Draft, Settings, Verdict

BATCHES = (1, 8, 32, 128)
GAMMAS = (1, 4, 8, 16)
VOCABULARIES = (32_000, 49_152, 128_256, 151_936)
TEMPERATURE = 0.8
GRAPH_CALLS = 20  # verifications in one CUDA graph, so that the graph's own launch is spread
Call = Callable[[], Any]


class Inputs:
    """Random logits of one shape whose drafts agree about as often as a good drafter's."""

    def __init__(self, batch: int, gamma: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(batch * 1_000_003 + gamma * 1009 + vocabulary)
        logits = torch.randn(batch, gamma + 1, vocabulary, generator=generator, device=device) * 3
        noise = torch.randn(batch, gamma, vocabulary, generator=generator, device=device)
        self.shape = (batch, gamma, vocabulary)
        self.logits = logits.to(dtype)
        self.draft_logits = (logits[:, :gamma] + 0.7 * noise).to(dtype)
        q = torch.softmax(self.draft_logits.float() / TEMPERATURE, -1)
        self.ids = torch.multinomial(q.view(-1, vocabulary), 1, generator=generator).view(batch, gamma)
        self.lse = torch.logsumexp(self.draft_logits.float() / TEMPERATURE, -1)
        self.settings = Settings.of(SamplingParams(temperature=TEMPERATURE), batch, device)
        self.temperature = self.settings.temperature
        self.seed = torch.arange(batch, device=device, dtype=torch.int64)
        self.position = torch.full((batch,), 77, device=device, dtype=torch.int64)

    @property
    def floor_bytes(self) -> int:
        """Each needed row once: 2γ+1 of them."""
        batch, gamma, vocabulary = self.shape
        return batch * (2 * gamma + 1) * vocabulary * self.logits.element_size()


def methods(inputs: Inputs) -> Iterator[tuple[str, Call]]:
    """The ways to verify, by name; the slow ones at γ = 4 only."""
    i = inputs
    arguments = (i.logits, i.draft_logits, i.ids, i.temperature)
    if reason_without_triton() is None and i.logits.is_cuda:
        from flashspec.verifiers.triton import TritonVerifier

        def ours(
            rule: str, draft: Draft, schedule: str = "auto", settings: Settings = i.settings
        ) -> Callable[[], Verdict]:
            verifier = TritonVerifier(schedule)
            return lambda: verifier.verify(i.logits, draft, settings, rule, i.seed, i.position)

        raw = Draft(i.ids, logits=i.draft_logits)
        yield "triton", ours("token", raw)
        verifier = TritonVerifier()
        yield "triton_bound", verifier.bind(i.logits, raw, i.settings, "token", i.seed, i.position)
        yield "triton_block", ours("block", raw)
        yield "triton_lse", ours("token", Draft(i.ids, logits=i.draft_logits, lse=i.lse))
        yield "triton_fused", ours("token", raw, "fused")
        yield "triton_split", ours("token", raw, "split")
        yield "triton_coupled", ours("coupled", raw)
        if i.shape[1] == 4:
            cut = Settings.of(SamplingParams(temperature=TEMPERATURE, top_p=0.9), i.shape[0], i.logits.device)
            yield "triton_top_p", ours("token", raw, "auto", cut)
    yield "eager", lambda: baselines.eager(*arguments)
    if i.shape[1] == 4:
        yield "eager_lean", lambda: baselines.eager_lean(*arguments)
        yield "eager_top_p", lambda: baselines.eager(*arguments, top_p=0.9)


def compiled(inputs: Inputs) -> tuple[str, Call]:
    """torch.compile of the better-known baseline."""
    function = torch.compile(baselines.eager, dynamic=False, fullgraph=True)
    return "compiled", lambda: function(inputs.logits, inputs.draft_logits, inputs.ids, inputs.temperature)


def in_graph(call: Call, repeats: int = 15) -> float | None:
    """Median µs of one call inside a CUDA graph; None where the call cannot be captured."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(GRAPH_CALLS):
                    call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    times: list[float] = []
    while len(times) < 5 or (len(times) < repeats and sum(times) * GRAPH_CALLS < 300_000):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / GRAPH_CALLS)
    del graph
    return round(statistics.median(times[2:]), 2)


def launched(call: Call, repeats: int = 60) -> float:
    """Median µs of one call launched from Python and waited for."""
    on_gpu = torch.cuda.is_available()
    times = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return round(statistics.median(times[repeats // 6 :]), 1)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a device-to-device copy, read and written counted."""
    source = torch.ones(2**29, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    micro = in_graph(lambda: torch.mul(source, 1.0, out=target), repeats=8)
    return 2 * source.numel() * source.element_size() / ((micro or 1) * 1e-6)


def run(
    batches: tuple[int, ...] = BATCHES,
    gammas: tuple[int, ...] = GAMMAS,
    vocabularies: tuple[int, ...] = VOCABULARIES,
    dtypes: tuple[str, ...] = ("bfloat16",),
    compile_shapes: int = 0,
    write: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure every shape; prints a table and calls `keep` with the result as it grows. On a CPU: PyTorch alone, small shapes."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    notes = []
    if not gpu:
        notes.append(
            "No CUDA device: Triton, CUDA graphs and shapes above B = 8 are skipped; PyTorch eager is launched from Python."
        )
        batches, dtypes = tuple(b for b in batches if b <= 8), ("float32",)
    elif reason := reason_without_triton():
        notes.append(f"Triton is skipped: {reason}")
    bandwidth = copy_bandwidth(device) if gpu else 0.0
    result: dict[str, Any] = {
        "command": "flashspec bench verify",
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version(), **_triton_version()},
        "date": date.today().isoformat(),
        "copy_bandwidth": bandwidth or None,
        "temperature": TEMPERATURE,
        "notes": notes,
        "rows": [],
    }
    for note in notes:
        write(note)
    # The machine's own latency: an empty kernel, launched and waited for, beside which the launched figures are read.
    if gpu:
        word = torch.zeros(1, device=device)
        result["empty"] = {"graph": in_graph(lambda: word.fill_(0)), "launched": launched(lambda: word.fill_(0))}
        write(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; an empty kernel: {result['empty']} µs")
    compiled_left = compile_shapes
    for dtype in dtypes:
        for vocabulary in vocabularies:
            for gamma in gammas:
                for batch in batches:
                    inputs = Inputs(batch, gamma, vocabulary, getattr(torch, dtype), device)
                    row: dict[str, Any] = {"B": batch, "gamma": gamma, "V": vocabulary, "dtype": dtype}
                    if bandwidth:
                        row["floor"] = round(inputs.floor_bytes / bandwidth * 1e6, 2)
                    calls = list(methods(inputs))
                    if compiled_left and batch in (1, 32) and gamma == 4 and vocabulary in (32_000, 151_936):
                        calls.append(compiled(inputs))
                        compiled_left -= 1
                    row["graph"] = {name: in_graph(call) for name, call in calls} if gpu else {}
                    once = batch in (1, 32) or not gpu
                    row["launched"] = {name: launched(call) for name, call in calls} if once else {}
                    result["rows"].append(row)
                    write(_line(row))
                    keep(result)
                    del inputs, calls
                    if gpu:
                        torch.cuda.empty_cache()
    result["accept_only"] = [accept_only(batch, 4, 32_000, device) for batch in batches]
    return result


def accept_only(batch: int, gamma: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Acceptance alone from ready log-probabilities, the job that earlier kernels were measured on."""
    generator = torch.Generator(device).manual_seed(1)
    log_p, log_q = (
        torch.randn(batch, gamma, vocabulary, generator=generator, device=device).log_softmax(-1) for _ in range(2)
    )
    ids = torch.randint(0, vocabulary, (batch, gamma), generator=generator, device=device)
    uniforms = torch.rand(batch, gamma, generator=generator, device=device)
    calls: dict[str, Call] = {"eager": lambda: baselines.accept_only(log_p, log_q, ids, uniforms)}
    if device.type == "cuda" and reason_without_triton() is None:
        from flashspec.verifiers.triton import accept_only as ours

        calls["triton"] = lambda: ours(log_p, log_q, ids, uniforms)
    row: dict[str, Any] = {"B": batch, "gamma": gamma, "V": vocabulary}
    row["graph"] = {name: in_graph(call) for name, call in calls.items()} if device.type == "cuda" else {}
    row["launched"] = {name: launched(call) for name, call in calls.items()}
    return row


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    figures = "  ".join(f"{name} {value}" for name, value in (row["graph"] or row["launched"]).items())
    return (
        f"B={row['B']:<4} γ={row['gamma']:<3} V={row['V']:<7} {row['dtype']}  floor {row.get('floor', '–')}  {figures}"
    )


def _triton_version() -> dict[str, str]:
    if reason_without_triton():
        return {}
    import triton

    return {"triton": triton.__version__}

"""Host time and CUDA graph time of decoding a token, an old tree against the current one, on one GPU.

    python benchmarks/decode_trees.py --old old --limit 540 --commit NAME [--cpu]      (parent)

The parent starts one process per tree and round, in the order old new, new old, …, with PYTHONPATH that puts the tree
first. A worker times every case; differences are taken within a round, and their median counts.

host_us    perf_counter over a lap of calls without a graph and without waiting, per layer; median of LAPS laps
total_us   the same laps until the GPU is done: equal to host_us where the GPU is not the bottleneck
graph_us   CUDA events around a lap of replays of a captured step, per layer; median of laps
graph_host_us  (models) perf_counter of DecodeStep over the same laps, without waiting: replay and the host's checks
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Calls per lap by kind: few enough that their launches find room in the queue of the GPU (about 1,000).
LAP = {'layer': 40, 'model': 10}
LAPS, WARM_UPS, PROMPT = 12, 20, 4096
HEADS = {'64/4x128': (64, 4, 128), '8/4x64': (8, 4, 64)}
DEPTH = 4
ATTENTION = dict(
    sliding_window_size=512,
    compress_block_size=32,
    compress_block_sliding_stride=16,
    selection_block_size=64,
    num_selected_blocks=16,
)
TINY = dict(
    sliding_window_size=16,
    compress_block_size=8,
    compress_block_sliding_stride=4,
    selection_block_size=8,
    num_selected_blocks=5,
)
METRICS = ('host_us', 'total_us', 'graph_us', 'graph_host_us')
LIMIT_HOST_US = 5.0


def make_cases():
    for kind, phi in (('layer', 'mlp'), ('layer', 'mean'), ('model', 'mlp')):
        for heads in HEADS:
            for batch in (1, 8):
                yield f'{kind} {phi} {heads} B{batch}', kind, phi, heads, batch


def worker(tree: str, cpu: bool) -> None:
    import torch

    import native_sparse_attention
    from native_sparse_attention import SparseAttention
    from native_sparse_attention.compress import MeanPool
    from native_sparse_attention.generation import DecodeStep
    from native_sparse_attention.transformer import Transformer

    package = Path(native_sparse_attention.__file__).resolve()
    assert package.is_relative_to(Path(tree).resolve()), f'{package} is not in {tree}'
    device = 'cpu' if cpu else 'cuda'
    dtype = torch.float32 if cpu else torch.bfloat16
    interpreted = os.environ.get('TRITON_INTERPRET') == '1'
    backend = 'eager' if cpu and not interpreted else 'triton'
    laps, warm_ups, prompt = (2, 3, 70) if cpu else (LAPS, WARM_UPS, PROMPT)

    def sync() -> None:
        if not cpu:
            torch.cuda.synchronize()

    def time_laps(call, lap: int, layers: int) -> tuple[float, float]:
        """Microseconds per call and layer: of the host, and until the GPU is done."""
        host, total = [], []
        for index in range(laps + 1):  # the first is not counted
            sync()
            began = time.perf_counter()
            for _ in range(lap):
                call()
            queued = time.perf_counter()
            sync()
            ended = time.perf_counter()
            if index:
                host.append(1e6 * (queued - began) / lap / layers)
                total.append(1e6 * (ended - began) / lap / layers)
        return statistics.median(host), statistics.median(total)

    def time_replays(call, lap: int, layers: int) -> tuple[float, float]:
        """Microseconds per call and layer: of the GPU between events, and of the host."""
        gpu, host = [], []
        for index in range(laps + 1):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            sync()
            start.record()
            began = time.perf_counter()
            for _ in range(lap):
                call()
            queued = time.perf_counter()
            stop.record()
            sync()
            if index:
                gpu.append(1e3 * start.elapsed_time(stop) / lap / layers)
                host.append(1e6 * (queued - began) / lap / layers)
        return statistics.median(gpu), statistics.median(host)

    def capture(run):
        """A graph of run(), whose kernels are loaded already. The graph reads the cache that run closes over."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return graph, out

    def measure(kind: str, phi: str, heads: str, batch: int) -> dict:
        hq, h, d = (4, 2, 16) if cpu else HEADS[heads]
        dim = hq * d if cpu else min(2048, hq * d)
        settings = TINY if cpu else ATTENTION
        lap = 3 if cpu else LAP[kind]
        capacity = prompt + 2 * (warm_ups + lap * (laps + 1)) + 16
        torch.manual_seed(0)
        if kind == 'layer':
            phi_modules = dict(compress_mlp=(MeanPool(), MeanPool())) if phi == 'mean' else {}
            module = SparseAttention(
                dim=dim, dim_head=d, heads=hq, kv_heads=h, causal=True, backend=backend, **settings, **phi_modules
            )
            module = module.to(device, dtype).eval()
            cache = module.init_cache(batch, capacity)
            x = torch.randn(batch, prompt, dim, device=device, dtype=dtype)
            module(x, cache=cache)
            token, layers = x[:, :1].contiguous(), 1
        else:
            module = Transformer(
                num_tokens=256,
                dim=dim,
                depth=DEPTH,
                dim_head=d,
                heads=hq,
                kv_heads=h,
                use_sparse_attn=True,
                sparse_attn_kwargs=settings,
                backend=backend,
            )
            module = module.to(device, dtype).eval()
            cache = module.init_cache(batch, capacity)
            ids = torch.randint(256, (batch, prompt), device=device)
            module.prefill(ids, cache)
            token, layers = ids[:, :1].contiguous(), DEPTH

        def run():
            return module(token, cache=cache)

        for _ in range(warm_ups):
            out = run()
        fixed = module.decodes_fixed(cache, num_tokens=1)
        assert fixed or cpu, 'the decode kernels do not serve this case'
        found: dict = {'fixed': bool(fixed), 'finite': bool(out.isfinite().all())}
        found['host_us'], found['total_us'] = time_laps(run, lap, layers)
        if kind == 'layer' and not cpu:
            graph, out = capture(run)
            found['graph_us'], _ = time_replays(graph.replay, lap, 1)
            found['finite'] &= bool(out.isfinite().all())
        elif kind == 'model':
            step = DecodeStep(module, cache)
            for _ in range(3):  # without a graph, capture, replay
                out = step(token)
            assert step.uses_graph or cpu
            if not cpu:
                found['graph_us'], found['graph_host_us'] = time_replays(lambda: step(token), lap, layers)
            found['finite'] &= bool(out.isfinite().all())
        sync()
        return found

    with torch.no_grad():
        for name, *case in make_cases():
            gc.collect()
            gc.disable()
            result = measure(*case)
            gc.enable()
            print('RESULT ' + json.dumps({'case': name, **result}), flush=True)
            if not cpu:
                torch.cuda.empty_cache()
    about = {'torch': torch.__version__, 'device': torch.cuda.get_device_name() if not cpu else 'cpu'}
    print('ABOUT ' + json.dumps(about), flush=True)


def run_worker(tree: str, seconds: float, cpu: bool) -> tuple[dict, dict]:
    site = os.environ.get('AB_SITE', '')
    env = {**os.environ, 'PYTHONPATH': f'{tree}:{site}'}
    command = [sys.executable, os.path.abspath(__file__), '--worker', tree, *(['--cpu'] if cpu else [])]
    # Not in the current folder: its package would hide that of another tree.
    child = subprocess.Popen(
        command, env=env, cwd=tempfile.gettempdir(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        text, _ = child.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        child.kill()
        text, _ = child.communicate()
        print(f'-- worker of {tree} stopped after {seconds:.0f} s', flush=True)
    results, about = {}, {}
    for line in text.splitlines():
        if line.startswith('RESULT '):
            entry = json.loads(line[7:])
            results[entry.pop('case')] = entry
        elif line.startswith('ABOUT '):
            about = json.loads(line[6:])
    if child.returncode:
        print(f'-- worker of {tree}: rc {child.returncode}\n' + text[-3000:], flush=True)
    return results, about


def summarise(rounds: list) -> dict:
    table = {}
    for name, *_ in make_cases():
        pairs = [(r['old'][name], r['new'][name]) for r in rounds if name in r['old'] and name in r['new']]
        row = {'pairs': len(pairs)}
        for metric in METRICS:
            values = [(a[metric], b[metric]) for a, b in pairs if metric in a and metric in b]
            if values:
                differences = sorted(b - a for a, b in values)
                row[metric] = {
                    'old': statistics.median(a for a, _ in values),
                    'new': statistics.median(b for _, b in values),
                    'difference': statistics.median(differences),
                    'low': differences[0],
                    'high': differences[-1],
                    'ratio': statistics.median(b / a for a, b in values),
                }
        table[name] = row
    return table


def show(table: dict, rounds: int) -> None:
    print(f'\nmicroseconds per layer and token: old > new (median paired difference; lowest, highest), {rounds} rounds')
    for name, row in table.items():
        cells = []
        for metric in METRICS:
            if metric in row:
                m = row[metric]
                cells.append(
                    f'{metric[:-3]} {m["old"]:.1f} > {m["new"]:.1f} ({m["difference"]:+.1f}; {m["low"]:+.1f}, {m["high"]:+.1f})'
                )
        print(f'{name:22} ' + ' | '.join(cells))
    host = [row['host_us']['difference'] for row in table.values() if 'host_us' in row]
    graph = [row['graph_us']['ratio'] for row in table.values() if 'graph_us' in row]
    if host:
        verdict = 'met' if max(host) <= LIMIT_HOST_US else 'MISSED'
        print(
            f'host without a graph: {min(host):+.1f} to {max(host):+.1f} us per layer, limit +{LIMIT_HOST_US:g}: {verdict}'
        )
    if graph:
        print(f'in a graph: new / old {min(graph):.4f} to {max(graph):.4f}')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--worker')
    parser.add_argument('--old', default='old')
    parser.add_argument('--new', default=os.getcwd())
    parser.add_argument('--limit', type=float, default=540)
    parser.add_argument('--rounds', type=int, default=6)
    parser.add_argument('--commit', default='')
    parser.add_argument('--cpu', action='store_true')
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.cpu)
    began = time.monotonic()
    trees = {'old': os.path.abspath(options.old), 'new': os.path.abspath(options.new)}
    out = Path('decode_trees')
    out.mkdir(parents=True, exist_ok=True)
    rounds, about, longest = [], {}, 0.0

    def left() -> float:
        return options.limit - 10 - (time.monotonic() - began)

    # Round -1 compiles kernels and is not counted.
    for index in range(-1, options.rounds):
        if index > 0 and left() < 1.2 * longest:
            print(f'-- no time for round {index}', flush=True)
            break
        started, found = time.monotonic(), {}
        for name in (('old', 'new'), ('new', 'old'))[index % 2]:
            found[name], seen = run_worker(trees[name], left(), options.cpu)
            about = seen or about
        took = time.monotonic() - started
        if index >= 0:
            longest = max(longest, took)
            rounds.append(found)
        print(f'round {index}: {took:.0f} s, cases {len(found["old"])} and {len(found["new"])}', flush=True)
        table = summarise(rounds)
        record = {'commit': options.commit, 'old': '220c724', **about, 'rounds': rounds, 'summary': table}
        (out / 'ab_decode.json').write_text(json.dumps(record, indent=1))
    bad = {name for r in rounds for t in r.values() for name, entry in t.items() if not entry['finite']}
    if bad:
        print('NON-FINITE OUTPUTS:', sorted(bad))
    print(about)
    show(summarise(rounds), len(rounds))


if __name__ == '__main__':
    main()

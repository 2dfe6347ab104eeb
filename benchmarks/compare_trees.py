"""Is the package of one tree slower than that of another? Decoding and training of plain modules, in turn, on one GPU.

    python compare_trees.py --old OLD --new . --limit 215 --out "$OUT" [--control] [--cases 'decode*,train-mlp'] [--cpu]

Every tree and case has a process of its own. All compile side by side; then they take turns: in each sweep every case is
measured once by each tree, while the other processes wait. Ratios and differences are those of one sweep; the medians
over all sweeps count. --control adds a second process of the old tree: new / old is to be read beside old / old.

host_us        a token without a graph: CPU time of the process over a lap of calls that are queued without waiting, per layer
total_us       the same laps until the GPU is done; near host_us where the host is the bottleneck
graph_us       a token in a CUDA graph: events around a lap of replays, per layer
graph_host_us  CPU time over these replays, per layer (of DecodeStep where the case is a model)
train_ms       forward and backward of the layer: events around a lap of steps; forward_ms: its forward alone
kernels_ms     kernels and copies of such a step by the profiler
train_host_us  CPU time over a lap of such steps that are queued without waiting
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MARK = 'RESULT '
DEPTH = 6
CASES = {  # kind, φ
    'decode-layer-mean': ('layer', 'mean'),
    'decode-layer-mlp': ('layer', 'mlp'),
    'decode-model-mean': ('model', 'mean'),
    'train-mlp': ('train', 'mlp'),
    'train-mean': ('train', 'mean'),
    'train-conv': ('train', 'conv'),
}
# Limit of a metric: of the ratio new / old, or of the difference new - old in µs per layer.
RATIO_LIMITS = {'graph_us': 1.01, 'kernels_ms': 1.01}
DIFFERENCE_LIMITS = {'host_us': 5.0, 'graph_host_us': 5.0}
MAX_SWEEPS = 80

GPU = {
    'sizes': {'dim': 2048, 'dim_head': 128, 'heads': 64, 'kv_heads': 4},
    'attention': {
        'sliding_window_size': 512,
        'compress_block_size': 32,
        'compress_block_sliding_stride': 16,
        'selection_block_size': 64,
        'num_selected_blocks': 16,
    },
    'prompt': 4096,
    'seqlen': 8192,
    # Laps per measurement, the first of which is not counted, and calls per lap: few enough that their launches find
    # room in the queue of the GPU (about 1,000), so that the host never waits for it.
    'laps': {'layer': 12, 'model': 12, 'train': 4},
    'calls': {'layer': 16, 'model': 6, 'train': 3},
    'replays': 32,
}
CPU = {
    'sizes': {'dim': 64, 'dim_head': 16, 'heads': 4, 'kv_heads': 2},
    'attention': {
        'sliding_window_size': 16,
        'compress_block_size': 8,
        'compress_block_sliding_stride': 4,
        'selection_block_size': 8,
        'num_selected_blocks': 5,
    },
    'prompt': 70,
    'seqlen': 96,
    'laps': {'layer': 2, 'model': 2, 'train': 2},
    'calls': {'layer': 2, 'model': 2, 'train': 1},
    'replays': 2,
}


class Clock:
    """Laps on a GPU, or on a CPU, where the clock of the host stands for events."""

    def __init__(self, cpu: bool, laps: int) -> None:
        import torch

        self.torch, self.cpu, self.laps = torch, cpu, laps

    def sync(self) -> None:
        if not self.cpu:
            self.torch.cuda.synchronize()

    def queued(self, call, count: int) -> tuple[float, float]:
        """Median µs of a call: on the host, and until the GPU is done."""
        host, total = [], []
        for index in range(self.laps + 1):
            self.sync()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                call()
            queued = began + time.process_time() - used
            self.sync()
            ended = time.perf_counter()
            if index:
                host.append(1e6 * (queued - began) / count)
                total.append(1e6 * (ended - began) / count)
        return statistics.median(host), statistics.median(total)

    def events(self, call, count: int) -> tuple[float, float]:
        """Median µs of a call: on the GPU between two events, and on the host."""
        gpu, host = [], []
        for index in range(self.laps + 1):
            self.sync()
            if not self.cpu:
                start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            began = time.process_time()
            for _ in range(count):
                call()
            queued = time.process_time()
            if not self.cpu:
                stop.record()
            self.sync()
            if index:
                host.append(1e6 * (queued - began) / count)
                gpu.append(host[-1] if self.cpu else 1e3 * start.elapsed_time(stop) / count)
        return statistics.median(gpu), statistics.median(host)


def backend_of(cpu: bool) -> str:
    return 'eager' if cpu and os.environ.get('TRITON_INTERPRET') != '1' else 'triton'


def make_network(phi: str, sizes: dict, block_size: int):
    from native_sparse_attention.compress import ConvLinearCompress, MeanPool

    match phi:
        case 'mean':
            return MeanPool()
        case 'conv':
            return ConvLinearCompress(sizes['kv_heads'], sizes['dim_head'], block_size)
    return None  # the default network, CompressMLP


def kernel_ms(step) -> float:
    """Return what the kernels and copies of a step take on the GPU, without waiting for the host."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def prepare_train(phi: str, setup: dict, cpu: bool, clock: Clock):
    """Compile and return measure()."""
    import torch

    from native_sparse_attention import SparseAttention

    sizes, attention = setup['sizes'], setup['attention']
    device, dtype = ('cpu', torch.float32) if cpu else ('cuda', torch.bfloat16)
    module = SparseAttention(
        **sizes,
        **attention,
        causal=True,
        compress_mlp=make_network(phi, sizes, attention['compress_block_size']),
        backend=backend_of(cpu),
    ).to(device, dtype)
    x = torch.randn(1, setup['seqlen'], sizes['dim'], device=device, dtype=dtype, requires_grad=True)
    dout = torch.randn_like(x)
    leaves = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]

    def step():
        out = module(x)
        torch.autograd.grad(out, leaves, dout, allow_unused=True)
        return out

    for _ in range(3):
        out = step()
    assert bool(out.isfinite().all()), 'the output is not finite'
    count = setup['calls']['train']

    def measure() -> dict:
        train_us, _ = clock.events(step, count)
        forward_us, _ = clock.events(lambda: module(x), count)
        host_us, _ = clock.queued(step, count)
        kernels_ms = float('nan') if cpu else kernel_ms(step)
        return {
            'train_ms': train_us / 1e3,
            'kernels_ms': kernels_ms,
            'forward_ms': forward_us / 1e3,
            'train_host_us': host_us,
        }

    return measure, {}


def prepare_decode(kind: str, phi: str, setup: dict, cpu: bool, clock: Clock):
    """Compile, capture and return measure()."""
    import torch

    from native_sparse_attention import SparseAttention
    from native_sparse_attention.generation import DecodeStep
    from native_sparse_attention.transformer import Transformer

    sizes, attention = setup['sizes'], dict(setup['attention'])
    device, dtype = ('cpu', torch.float32) if cpu else ('cuda', torch.bfloat16)
    backend = backend_of(cpu)
    network = make_network(phi, sizes, attention['compress_block_size'])
    if network is not None:
        attention['compress_mlp'] = network
    count, replays, laps = setup['calls'][kind], setup['replays'], setup['laps'][kind] + 1
    if kind == 'layer':
        module, layers = SparseAttention(**sizes, **attention, causal=True, backend=backend), 1
        prompt = torch.randn(1, setup['prompt'], sizes['dim'], device=device, dtype=dtype)
    else:
        module, layers = (
            Transformer(
                256, depth=DEPTH, **sizes, use_sparse_attn=True, sparse_attn_kwargs=attention, backend=backend
            ),
            DEPTH,
        )
        prompt = torch.randint(256, (1, setup['prompt']), device=device)
    module = module.to(device, dtype).eval()
    token = prompt[:, :1].contiguous()
    # One cache for calls without a graph and one for the graph, whose replays the host of the other does not see.
    caches = []
    for calls in (count, replays):
        cache = module.init_cache(1, setup['prompt'] + 64 + (MAX_SWEEPS + 1) * laps * calls)
        with torch.no_grad():
            module(prompt, cache=cache)
        caches.append(cache)
    plain, fixed = caches

    def run():
        return module(token, cache=plain)

    for _ in range(12):
        out = run()
    serves = bool(module.decodes_fixed(plain, num_tokens=1))
    assert serves or cpu, 'the decode kernels do not serve this case'
    assert bool(out.isfinite().all()), 'the output is not finite'
    facts = {'decodes_fixed': serves}
    if kind == 'model':
        step = DecodeStep(module, fixed)
        for _ in range(3):  # without a graph, capture, replay
            out = step(token)
        facts['uses_graph'] = bool(step.uses_graph)
        assert step.uses_graph or cpu, 'DecodeStep uses no graph'

        def replay():
            return step(token)
    elif cpu:

        def replay():
            return module(token, cache=fixed)
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                module(token, cache=fixed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(token, cache=fixed)
        replay = graph.replay
        replay()
    clock.sync()
    assert bool(out.isfinite().all()), 'the output of the graph is not finite'

    def measure() -> dict:
        host, total = clock.queued(run, count)
        graph_gpu, graph_host = clock.events(replay, replays)
        return {
            'host_us': host / layers,
            'total_us': total / layers,
            'graph_us': graph_gpu / layers,
            'graph_host_us': graph_host / layers,
        }

    return measure, facts


def work(tree: str, case: str, cpu: bool) -> None:
    """Serve one case: 'prepare', then any number of 'measure', a line each; a line of JSON answers."""

    def answer(**result) -> None:
        print(MARK + json.dumps(result), flush=True)

    try:
        import torch

        import native_sparse_attention

        package = Path(native_sparse_attention.__file__).resolve()
        assert package.is_relative_to(Path(tree).resolve()), f'{package} is not in {tree}'
        torch.set_num_threads(1)
        torch.manual_seed(0)
        kind, phi = CASES[case]
        setup = CPU if cpu else GPU
        clock = Clock(cpu, setup['laps'][kind])
        with torch.no_grad() if kind != 'train' else contextlib.nullcontext():
            if kind == 'train':
                measure, facts = prepare_train(phi, setup, cpu, clock)
            else:
                measure, facts = prepare_decode(kind, phi, setup, cpu, clock)
            measure()  # the first laps are slower
            gc.collect()
            gc.freeze()
            gc.disable()
            device = 'cpu' if cpu else torch.cuda.get_device_name()
            answer(torch=torch.__version__, device=device, **facts)
            for line in sys.stdin:
                assert line.strip() == 'measure', line
                answer(**measure())
    except BaseException as error:
        answer(error=f'{type(error).__name__}: {error}'[:500])
        raise


class Worker:
    def __init__(self, tree: str, case: str, cpu: bool, log) -> None:
        environment = os.environ | {'PYTHONPATH': os.pathsep.join([tree, os.environ.get('PYTHONPATH', '')])}
        environment['OMP_NUM_THREADS'] = '1'
        command = [sys.executable, os.path.abspath(__file__), '--worker', tree, '--cases', case]
        # Not in the current folder: its package would hide that of the other tree.
        self.process = subprocess.Popen(
            [*command, *(['--cpu'] if cpu else [])],
            cwd=tempfile.gettempdir(),
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.lines.put(json.loads(line[len(MARK) :]))
        self.lines.put({'error': 'the process ended'})

    def answer(self, deadline: float) -> dict:
        try:
            return self.lines.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            return {'error': 'no answer in time'}

    def measure(self, deadline: float) -> dict:
        try:
            self.process.stdin.write('measure\n')
            self.process.stdin.flush()
        except OSError as error:
            return {'error': f'{type(error).__name__}: {error}'}
        return self.answer(deadline)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method='inclusive')


def summarise(sweeps: list[dict]) -> dict:
    """Return by case and metric the medians, and quartiles of ratios and differences within a sweep."""
    table: dict = {}
    for case in CASES:
        rows = [sweep[case] for sweep in sweeps if case in sweep]
        for metric in rows[0]['old'] if rows else ():
            entry = {'sweeps': len(rows)}
            for tree in rows[0]:
                entry[tree] = statistics.median(row[tree][metric] for row in rows)
            for tree in [tree for tree in rows[0] if tree != 'old']:
                pairs = [(row['old'][metric], row[tree][metric]) for row in rows]
                entry[f'{tree}_ratio'] = quartiles([after / before for before, after in pairs])
                entry[f'{tree}_difference'] = quartiles([after - before for before, after in pairs])
            table.setdefault(case, {})[metric] = entry
    return table


def verdict(metric: str, entry: dict) -> str:
    if metric in RATIO_LIMITS:
        return 'met' if entry['new_ratio'][1] <= RATIO_LIMITS[metric] else 'MISSED'
    if metric in DIFFERENCE_LIMITS:
        return 'met' if entry['new_difference'][1] <= DIFFERENCE_LIMITS[metric] else 'MISSED'
    return ''


def show(table: dict) -> None:
    print('\nmedians; new - old and new / old within a sweep: median (quartiles); control: old / old')
    print(f'{"case":18} {"metric":14} {"n":>3} {"old":>9} {"new":>9} {"new-old":>8} new/old                    control')
    for case, metrics in table.items():
        for metric, entry in metrics.items():
            ratios = []
            for tree in ('new', 'control'):
                low, middle, high = entry.get(f'{tree}_ratio', (0.0, 0.0, 0.0))
                ratios.append(f'{middle:.4f} ({low:.4f}, {high:.4f})' if middle else '')
            difference = entry['new_difference'][1]
            print(
                f'{case:18} {metric:14} {entry["sweeps"]:3} {entry["old"]:9.3f} {entry["new"]:9.3f} {difference:+8.3f} '
                f'{ratios[0]:26} {ratios[1]:26} {verdict(metric, entry)}'
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--worker')
    parser.add_argument('--old', default='old')
    parser.add_argument('--new', default='.')
    parser.add_argument('--cases', default='*')
    parser.add_argument('--limit', type=float, default=215, help='seconds for everything')
    parser.add_argument('--sweeps', type=int, default=MAX_SWEEPS, help='at most')
    parser.add_argument('--control', action='store_true', help='the old tree a second time')
    parser.add_argument('--commit', default='')
    parser.add_argument('--out', default='.')
    parser.add_argument('--cpu', action='store_true', help='tiny sizes with the eager backend, or with TRITON_INTERPRET=1')
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.cases, options.cpu)
    deadline = time.monotonic() + options.limit - 6
    trees = {'old': os.path.abspath(options.old), 'new': os.path.abspath(options.new)}
    if options.control:
        trees['control'] = trees['old']
    patterns = options.cases.split(',')
    cases = [case for case in CASES if any(fnmatch.fnmatch(case, pattern) for pattern in patterns)]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    record: dict = {'commit': options.commit, 'trees': trees, 'prepared': {}, 'errors': {}, 'sweeps': []}

    def write() -> None:
        record['summary'] = summarise(record['sweeps'])
        part = out / 'compare_trees.json.part'
        part.write_text(json.dumps(record, indent=1))
        part.replace(out / 'compare_trees.json')

    with tempfile.TemporaryFile('w+') as log:
        workers = {case: {tree: Worker(root, case, options.cpu, log) for tree, root in trees.items()} for case in cases}
        everyone = [(case, tree, worker) for case, found in workers.items() for tree, worker in found.items()]
        try:
            # Compilation may take up to two thirds of the time.
            ready_by = time.monotonic() + 0.65 * options.limit
            began = time.monotonic()
            for case, tree, worker in everyone:
                result = worker.answer(ready_by)
                record['prepared'][f'{case} {tree}'] = result
                if 'error' in result:
                    record['errors'][f'{case} {tree}'] = result['error']
                    worker.stop()
            print(f'prepared after {time.monotonic() - began:.0f} s', flush=True)
            # A case without a control is measured all the same.
            ready = {case: [tree for tree in trees if f'{case} {tree}' not in record['errors']] for case in cases}
            usable = [case for case in cases if {'old', 'new'} <= set(ready[case])]
            longest = 0.0
            for number in range(min(options.sweeps, MAX_SWEEPS)):
                if not usable or time.monotonic() + 1.1 * longest > deadline:
                    break
                started, sweep = time.monotonic(), {}
                names = list(trees)
                names = names[number % len(names) :] + names[: number % len(names)]
                for case in list(usable):
                    found = {tree: workers[case][tree].measure(deadline) for tree in names if tree in ready[case]}
                    errors = {f'{case} {tree}': each['error'] for tree, each in found.items() if 'error' in each}
                    if errors:
                        record['errors'] |= errors
                        usable.remove(case)
                    else:
                        sweep[case] = {tree: found[tree] for tree in ready[case]}
                longest = max(longest, time.monotonic() - started)
                record['sweeps'].append(sweep)
                write()
        finally:
            for _, _, worker in everyone:
                worker.stop()
            write()
            if record['errors']:
                log.seek(0)
                print(log.read()[-3000:])
    about = next((each for each in record['prepared'].values() if 'error' not in each), {})
    print({name: about.get(name) for name in ('device', 'torch')}, f'{len(record["sweeps"])} sweeps of {longest:.1f} s')
    for name, error in record['errors'].items():
        print(f'{name}: {error}')
    show(record['summary'])


if __name__ == '__main__':
    main()

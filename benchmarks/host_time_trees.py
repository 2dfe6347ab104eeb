"""Host time and wall time of plain main and of the patched tree, interleaved. python replay_time.py TREE: a worker."""

import argparse
import json
import os
import subprocess
import sys
import time

SHAPES = {
    '4k 64/4x128': (1, 4096, 64, 4, 128),
    '8k 64/4x128': (1, 8192, 64, 4, 128),
    '4x8k 8/4x64': (4, 8192, 8, 4, 64),
}


def serve(device):
    """Answer lines {shape, merged} with times in microseconds."""
    from dataclasses import replace

    import torch

    from benchmarks.host_time import SMALL, make_layer, make_nsa, measure
    from benchmarks.shapes import PAPER
    from contextlib import nullcontext
    from benchmarks.host_time import without_kernels

    calls = {}

    def call_of(shape, merged, kind):
        key = shape, merged, kind
        if key not in calls:
            batch, seqlen, heads, kv_heads, dim = SHAPES[shape]
            made = replace(
                PAPER, batch=batch, seqlen=seqlen, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim
            )
            made = made if device == 'cuda' else SMALL
            calls[key] = (make_layer if kind == 'layer' else make_nsa)(made, device, merged)
            for _ in range(40):  # compiled, and recorded where calls are replayed
                step(calls[key])
        return calls[key]

    def sync():
        if device == 'cuda':
            torch.cuda.synchronize()

    def step(call):
        out = call.run()
        torch.autograd.grad(out, call.leaves, torch.ones_like(out), allow_unused=True)

    def wall(call, laps=8, steps=12):
        """Forward + backward: wall time a step, and host time a step with an empty queue before."""
        times, host = [], []
        for _ in range(laps):
            sync()
            began = time.perf_counter()
            for _ in range(steps):
                step(call)
            host.append((time.perf_counter() - began) / steps)
            sync()
            times.append((time.perf_counter() - began) / steps)
        return 1e6 * min(times), 1e6 * min(host)

    def kernels(call):
        """Forward + backward in a CUDA graph."""
        if device != 'cuda':
            return 0.0
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step(call)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(call)
            best = []
            for _ in range(5):
                sync()
                began = time.perf_counter()
                for _ in range(5):
                    graph.replay()
                sync()
                best.append((time.perf_counter() - began) / 5)
            return 1e6 * min(best)
        except Exception as error:
            print(f'capture: {type(error).__name__}: {error}', file=sys.stderr)
            return float('nan')

    with without_kernels() if device == 'cpu' else nullcontext():
        for line in sys.stdin:
            case = json.loads(line)
            try:
                call = call_of(case['shape'], case['merged'], case['kind'])
                if case['what'] == 'laps':
                    laps = measure(call, device, case['laps'])
                    result = [lap.low for lap in laps]
                elif case['what'] == 'kernels':
                    result = [kernels(call)]
                else:
                    result = list(wall(call))
            except Exception as error:
                result = f'{type(error).__name__}: {error}'[:300]
            print(json.dumps(result), flush=True)


class Worker:
    def __init__(self, tree, device):
        environment = os.environ | {
            'PYTHONPATH': os.pathsep.join([tree, *os.environ.get('PYTHONPATH', '').split(os.pathsep)[1:]])
        }
        command = [sys.executable, os.path.abspath(__file__), '--serve', '--device', device]
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, **case):
        try:
            self.process.stdin.write(json.dumps(case) + '\n')
            self.process.stdin.flush()
            while line := self.process.stdout.readline():
                if line.startswith(('[', '"')):
                    return json.loads(line)
        except OSError as error:
            return f'{type(error).__name__}: {error}'
        return 'the worker ended'


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--serve', action='store_true')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--old')
    parser.add_argument('--new')
    parser.add_argument('--limit', type=float, default=120)
    parser.add_argument('--out', default='.')
    options = parser.parse_args()
    if options.serve:
        return serve(options.device)
    began = time.monotonic()
    workers = {'main': Worker(options.old, options.device), 'replay': Worker(options.new, options.device)}
    rows, rounds = {}, 3
    cases = [(kind, shape, merged) for kind in ('nsa', 'layer') for shape in SHAPES for merged in (False, True)]
    cases = [case for case in cases if case[0] == 'nsa' or case[1] == '8k 64/4x128']
    cases.sort(key=lambda case: (case[1] != '8k 64/4x128', case[0] != 'nsa'))
    for kind, shape, merged in cases:
        if time.monotonic() - began > options.limit * 0.85:
            print(f'no time left for {kind} {shape} merged={merged}')
            continue
        case = {'kind': kind, 'shape': shape, 'merged': merged}
        found = {tree: [] for tree in workers}
        for number in range(rounds):
            for tree, worker in workers.items():
                answer = {
                    'laps': worker.ask(what='laps', laps=6, **case),
                    'wall': worker.ask(what='wall', **case),
                }
                if number == 0:
                    answer['kernels'] = worker.ask(what='kernels', **case)
                found[tree].append(answer)
            if time.monotonic() - began > options.limit * 0.9:
                break
        rows[f'{kind} {shape} {"merged" if merged else "separate"}'] = found
        with open(os.path.join(options.out, 'replay_time.json'), 'w') as file:
            json.dump(rows, file, indent=1)
    for worker in workers.values():
        worker.process.stdin.close()
        worker.process.terminate()

    def best(found, what, index):
        values = [each[what][index] for each in found if isinstance(each.get(what), list) and len(each[what]) > index]
        return f'{min(values):.0f}' if values else '–'

    print('| µs, main / replay | host forward (no grad) | host forward | host backward | wall fwd+bwd | kernels |')
    print('| --- | --- | --- | --- | --- | --- |')
    for name, found in rows.items():
        cells = [
            ' / '.join(best(found[tree], what, index) for tree in workers)
            for what, index in (('laps', 0), ('laps', 1), ('laps', 2), ('wall', 0), ('kernels', 0))
        ]
        print(f'| {name} | {" | ".join(cells)} |')
        for tree, answers in found.items():
            errors = {value for each in answers for value in each.values() if isinstance(value, str)}
            if errors:
                print(f'{name}, {tree}: {errors}')


if __name__ == '__main__':
    main()

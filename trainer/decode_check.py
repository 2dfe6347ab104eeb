"""--check-decode: decoding through the cache against the full forward pass."""

from __future__ import annotations

import torch

from trainer.console import say
from trainer.record import Record


@torch.no_grad()
def check_decode(run: Record, exact: bool, generator: torch.Generator) -> int:
    """Compare cached decoding with the full forward pass; return the exit code, 1 for a difference.

    Logits are compared on random bytes, fed one by one. Repetitive text has blocks of equal score, of which rounding
    selects one in the full pass and possibly another in decoding. Greedy bytes after the prompt must be the likeliest
    by the full pass, or tie with them. exact: in float64, which only eager computes.
    """
    model, tolerance = (run.model.double(), 1e-9) if exact else (run.model, 1e-2)
    model.eval()
    prompt, count = run.prompt(), run.config.sample_bytes
    length = prompt.shape[1]
    ids = torch.randint(256, (1, length + count), generator=generator).to(prompt.device)
    full = model(ids)[:, length - 1 :]
    logits, cache = model(ids[:, :length], return_cache=True)
    steps = [logits[:, -1:]] + [model(new, cache=cache) for new in ids[:, length:].split(1, dim=1)]
    error = ((torch.cat(steps, 1) - full).abs().max() / full.abs().max()).item()
    new = model.generate(prompt, count, temperature=0)
    full = model(torch.cat((prompt, new), 1))[:, length - 1 : -1]
    lost = full.amax(-1) - full.gather(-1, new[..., None])[..., 0]
    passed = error <= tolerance and bool((lost <= 1e-2 * full.abs().max()).all())
    verdict = 'agrees with' if passed else 'DIFFERS from'
    found = f'logits to {error:.1e} of the largest ({tolerance:.0e} allowed)'
    found += f', {int((lost == 0).sum())} of {count} greedy bytes'
    say(f'{run.folder}, step {run.step}, {run.corpus.name}: decoding {verdict} the full forward: {found}')
    return 0 if passed else 1

"""The library's attention in packages for a GPU: the operator, where sizes are known and no mask is given."""

from __future__ import annotations

import math

from torch import Tensor

from minicompile.exporting.cuda import ATTENTIONS, step_by_step, written_out
from minicompile.plugins.flash_attention.operators import ATTENTION
from minicompile.plugins.flash_attention.recognise import LEAST_HEAD, MOST_HEAD, refusal


@written_out(*ATTENTIONS)
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor]:
    """Return softmax(q @ k^T * scale) @ v, laid out as the library's."""
    fits = refusal(q, k.mT, v, q, q) is None and LEAST_HEAD <= q.shape[-1] <= MOST_HEAD
    if mask is not None or not fits:
        return step_by_step(q, k, v, mask, causal, scale)
    score = f"x0 * {1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)!r}"
    if causal:
        seen = f"torch.ones({q.shape[2]}, {k.shape[2]}, dtype=torch.bool, device=x0.device).tril()"
        score = f"torch.where({seen}, {score}, float('-inf'))"
    out = ATTENTION(q, k, v, [], f"def score(x0):\n    return {score}")[0]
    return (out.transpose(1, 2).contiguous().transpose(1, 2),)

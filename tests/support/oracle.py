"""The truth the suite measures against: fp64, token by token, written apart from the package.

Nothing here imports the package's stages. `dense` is textbook attention, also over a block map;
`pooled` adds what skipped blocks contribute; `predicted_mean`, `predicted_rows` and `fewest`
restate selection with loops.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK_Q, BLOCK_K = 128, 64


def make_qkv(
    B=1, Hq=2, Hk=None, Lq=200, Lk=None, D=32, Dv=None, dtype=torch.float32, seed=0, sharp=1.0
):
    Hk, Lk, Dv = Hk or Hq, Lk or Lq, Dv or D
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, Lq, D, generator=g) * sharp
    k = torch.randn(B, Hk, Lk, D, generator=g) + torch.randn(B, Hk, 1, D, generator=g)
    v = torch.randn(B, Hk, Lk, Dv, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def clustered_qkv(B=1, Hq=2, Hk=None, L=640, D=32, dtype=torch.float32, seed=0, noise=0.3):
    """Blocks that share a direction, so that some of them matter and most do not."""
    Hk = Hk or Hq
    g = torch.Generator().manual_seed(seed)

    def grouped(H, block, gain):
        n = -(-L // block)
        directions = torch.randn(B, H, n, 1, D, generator=g) * gain
        x = directions + torch.randn(B, H, n, block, D, generator=g) * noise
        return x.flatten(2, 3)[:, :, :L]

    q, k = grouped(Hq, BLOCK_Q, 2.0), grouped(Hk, BLOCK_K, 1.5)
    v = torch.randn(B, Hk, L, D, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def pairs(shape, *, attn_mask=None, is_causal=False, causal_align="top_left"):
    """`(allowed bool, bias fp64)` over `[B, Hq, Lq, Lk]`."""
    Lq, Lk = shape[2:]
    allowed = torch.ones(shape, dtype=torch.bool)
    bias = torch.zeros(shape, dtype=torch.float64)
    if is_causal:
        offset = Lk - Lq if causal_align == "bottom_right" else 0
        allowed &= torch.arange(Lk)[None, :] <= torch.arange(Lq)[:, None] + offset
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            allowed &= attn_mask
        else:
            bias = bias + attn_mask.double()
            allowed &= bias != -math.inf
    return allowed, bias


def dense(
    q, k, v, *, attn_mask=None, is_causal=False, causal_align="top_left", scale=None, kept=None
):
    """`(out, lse)` in fp64; `kept` bool `[B, Hq, n_q, n_k]` narrows it to some blocks."""
    B, Hq, Lq, D = q.shape
    Lk = k.shape[2]
    group = Hq // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    allowed, bias = pairs(
        (B, Hq, Lq, Lk), attn_mask=attn_mask, is_causal=is_causal, causal_align=causal_align
    )
    if kept is not None:
        allowed = allowed & over_tokens(kept, Lq, Lk)
    s = q @ k.mT * (D**-0.5 if scale is None else scale) + bias
    s = s.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return p @ v, lse


def pooled(q, k, v, kept, group, *, means=None, scale=None, **masks):
    """`(out, lse)` in fp64 over the kept blocks, and one entry per `group` keys of each block that
    is skipped and wholly open. means: of keys and values, where they are not those of k and v."""
    B, Hq, Lq, D = q.shape
    Lk, heads = k.shape[2], Hq // k.shape[1]
    allowed, bias = pairs((B, Hq, Lq, Lk), **masks)
    if means is None:
        means = block_means(k, group), block_means(v, group)
    q, k, v, k_mean, v_mean = (x.double() for x in (q, k, v, *means))
    k, v, k_mean, v_mean = (x.repeat_interleave(heads, 1) for x in (k, v, k_mean, v_mean))
    scale = D**-0.5 if scale is None else scale
    s = (q @ k.mT * scale + bias).masked_fill(~(allowed & over_tokens(kept, Lq, Lk)), -math.inf)
    sizes = torch.tensor([min(group, Lk - c) for c in range(0, Lk, group)], dtype=torch.float64)
    entries = q @ k_mean.mT * scale + sizes.log()
    pools = over_tokens(~kept & open_blocks(allowed & (bias == 0)), Lq, Lk)[..., ::group]
    s = torch.cat([s, entries.masked_fill(~pools, -math.inf)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return p @ torch.cat([v, v_mean], 2), lse


def open_blocks(plain: Tensor) -> Tensor:
    """Blocks all of whose pairs are `plain`, `[B, Hq, n_q, n_k]`."""
    return ~allowed_blocks(~plain)


def over_tokens(blocks: Tensor, Lq: int, Lk: int) -> Tensor:
    """A block map spread over its tokens."""
    rows = blocks.repeat_interleave(BLOCK_Q, -2)[..., :Lq, :]
    return rows.repeat_interleave(BLOCK_K, -1)[..., :Lk]


def allowed_blocks(allowed: Tensor) -> Tensor:
    """Blocks in which any pair may attend, `[B, Hq, n_q, n_k]`, by looking at every pair."""
    Lq, Lk = allowed.shape[2:]
    rows = [allowed[:, :, r : r + BLOCK_Q].any(2) for r in range(0, Lq, BLOCK_Q)]
    rows = torch.stack(rows, 2)
    return torch.stack([rows[..., c : c + BLOCK_K].any(-1) for c in range(0, Lk, BLOCK_K)], -1)


def block_means(x: Tensor, block: int) -> Tensor:
    x = x.double()
    return torch.stack([x[:, :, r : r + block].mean(2) for r in range(0, x.shape[2], block)], 2)


def similarities(x: Tensor, block: int) -> Tensor:
    """Mean of all pairwise cosines of each block; a zero row has cosine 0 with everything."""
    x = x.double()
    norm = x.norm(dim=-1, keepdim=True)
    unit = torch.where(norm == 0, 0.0, x / norm)
    out = []
    for r in range(0, x.shape[2], block):
        u = unit[:, :, r : r + block]
        out.append((u @ u.mT).mean((-1, -2)))
    return torch.stack(out, 2)


def smoothed(k: Tensor) -> Tensor:
    return k.double() - k.double().mean(2, keepdim=True)


def predicted_mean(q, k, allowed, *, scale=None, min_similarity=None):
    """P̂ of the mean predictor, fp64 `[B, Hq, n_q, n_k]`."""
    Hq, D = q.shape[1], q.shape[3]
    group = Hq // k.shape[1]
    ks = smoothed(k)
    qm, km = block_means(q, BLOCK_Q), block_means(ks, BLOCK_K).repeat_interleave(group, 1)
    held = torch.tensor(
        [min(BLOCK_K, k.shape[2] - c) / BLOCK_K for c in range(0, k.shape[2], BLOCK_K)],
        dtype=torch.float64,
    )
    s = qm @ km.mT * (D**-0.5 if scale is None else scale) + held.log()
    may = allowed_blocks(allowed)
    if min_similarity is not None:
        odd = similarities(ks, BLOCK_K).repeat_interleave(group, 1) < min_similarity
        may = may & ~odd[:, :, None, :]
    return torch.softmax(s.masked_fill(~may, -math.inf), -1).nan_to_num(0.0)


def rows_of(i_q: int, Lq: int, r: int = 4) -> list[int]:
    start, n = i_q * BLOCK_Q, min(BLOCK_Q, Lq - i_q * BLOCK_Q)
    r = min(r, n)
    return [start + (t + 1) * n // r - 1 for t in range(r)]


def weights(q, k, allowed, bias, *, scale=None):
    """Dense attention probabilities, fp64; zero rows where nothing may be attended."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, 1)
    s = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return torch.softmax(s.masked_fill(~allowed, -math.inf), -1).nan_to_num(0.0)


def predicted_rows(q, k, allowed, bias, *, scale=None, r=4):
    """P̂ of the rows predictor, by averaging the true attention of the sampled rows."""
    p = weights(q, k, allowed, bias, scale=scale)
    Lq, Lk = p.shape[2:]
    out = []
    for i_q in range(-(-Lq // BLOCK_Q)):
        rows = p[:, :, rows_of(i_q, Lq, r)]
        mass = torch.stack([rows[..., c : c + BLOCK_K].sum(-1) for c in range(0, Lk, BLOCK_K)], -1)
        attends = (rows.sum(-1) > 0).sum(-1, keepdim=True)
        out.append(mass.sum(2) / attends.clamp(min=1))
    return torch.stack(out, 2)


def fewest(p: list[float], may: list[bool], mass: float) -> set[int]:
    """The fewest blocks, largest first and smaller index first, that reach `mass` of the whole."""
    order = sorted((j for j in range(len(p)) if may[j]), key=lambda j: (-p[j], j))
    whole, reached, kept = sum(p[j] for j in order), 0.0, set()
    for j in order:
        kept.add(j)
        reached += p[j]
        if mass < 1 and reached >= mass * whole:
            break
    return kept


def relative_l1(out: Tensor, truth: Tensor) -> float:
    return ((out.double() - truth).abs().sum() / truth.abs().sum()).item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(ints[x.element_size()])

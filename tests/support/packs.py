"""Packed sequences, and each of them alone."""

from __future__ import annotations

import torch

import sparge

Q_LENGTHS, K_LENGTHS = (5, 130, 64), (70, 64, 129)


def cuts(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


def packed(q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, *, Hq=4, Hk=2, D=16, Dv=24, dtype=None):
    g = torch.Generator().manual_seed(2)
    sizes = ((sum(q_lengths), Hq, D), (sum(k_lengths), Hk, D), (sum(k_lengths), Hk, Dv))
    tensors = [torch.randn(size, generator=g).to(dtype or torch.float32) for size in sizes]
    return (*tensors, cuts(q_lengths), cuts(k_lengths))


def one_by_one(query, key, value, cu_q, cu_k, **options):
    """`(out, lse)` of every sequence alone, packed again."""
    outs, lses = [], []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        q, k, v = (x.transpose(0, 1)[None] for x in (query[rows], key[keys], value[keys]))
        gqa = q.shape[1] != k.shape[1]
        out, lse = sparge.attention(q, k, v, enable_gqa=gqa, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def identical(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)

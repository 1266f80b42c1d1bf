"""A byte-level transformer in plain PyTorch. It learns the source of Python's standard library, or any other files."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ckpt_tasks.state.data.sampler import ResumableSampler

_BYTES: Final = 256
_HELD_OUT_PARTS: Final = 20  # One file in this many is held out.
_LEFT_OUT: Final = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_QUICK_BYTES: Final = 1 << 16


class Text(Dataset[Tensor]):
    """Adjacent windows of the data, each int64 of shape (context + 1,): inputs, and targets shifted by one byte."""

    def __init__(self, data: bytes, context: int):
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * self.context : (index + 1) * self.context + 1].long()


class Block(nn.Module):
    """Causal attention, then a feed-forward layer; each has a layer norm before it and a residual connection."""

    def __init__(self, d_model: int, n_heads: int, dropout: float):
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model, bias=False)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.feed_norm = nn.LayerNorm(d_model, bias=False)
        self.feed = nn.Sequential(
            nn.Linear(d_model, 4 * d_model, bias=False), nn.GELU(), nn.Linear(4 * d_model, d_model, bias=False)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, d_model) to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.n_heads, width // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        )
        x = x + self.dropout(self.out(mixed))
        result: Tensor = x + self.dropout(self.feed(self.feed_norm(x)))
        return result


class Transformer(nn.Module):
    """Predicts each next byte; the embedding and the output layer share their weights."""

    def __init__(self, context: int, d_model: int, n_layers: int, n_heads: int, dropout: float):
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, d_model)
        self.places = nn.Embedding(context, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, _BYTES, bias=False)
        self.head.weight = self.bytes.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_residual = name.endswith(("out.weight", "feed.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * n_layers) if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes, int64 (batch, time), to the logits of each next byte, float32 (batch, time, 256)."""
        x = self.dropout(self.bytes(tokens) + self.places.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ByteLM:
    """Trains a byte-level transformer, and measures how well it predicts files that it has not seen.

    `data` is a directory (all files in it) or a glob; without it, the standard library's source. `max_bytes` limits how
    much is read. A hash of the names chooses one file in twenty to be held out. `lr` rises over `warmup_steps`, then
    falls along a cosine to a tenth at `decay_steps`. `device` is a CUDA device if there is one, else the CPU. Losses
    are in nats per byte. Raises ValueError if the data is too small.
    """

    unit = "bytes"

    def __init__(
        self,
        *,
        seed: int = 0,
        data: str | None = None,
        max_bytes: int = 1 << 24,
        d_model: int = 192,
        n_layers: int = 4,
        n_heads: int = 6,
        context: int = 128,
        batch_size: int = 16,
        dropout: float = 0.05,
        lr: float = 3e-3,
        warmup_steps: int = 50,
        decay_steps: int = 600,
        weight_decay: float = 0.1,
        clip_norm: float = 1.0,
        device: str | None = None,
    ):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda":
            use_deterministic_kernels()
        torch.manual_seed(seed)
        train, held_out = (Text(part, context) for part in read(data, max_bytes))
        for name, part, least in (("training", train, batch_size), ("held-out", held_out, 1)):
            if len(part) < least:
                raise ValueError(
                    f"the {name} files hold {len(part)} windows of {context} bytes, and {least} are needed"
                )
        self.held_out, self.clip_norm, self.batch_size = held_out, clip_norm, batch_size
        self.model = Transformer(context, d_model, n_layers, n_heads, dropout).to(self.device)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.dim() == 2], "weight_decay": weight_decay},
                {"params": [p for p in self.model.parameters() if p.dim() != 2], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=(0.9, 0.98),
        )

        def schedule(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            part = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * part))

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.sampler = ResumableSampler(len(train), batch_size, seed=seed)
        self._batches = self.sampler.follow(DataLoader(train, batch_sampler=self.sampler))
        self.state: Mapping[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.sampler,
        }

    def train_step(self) -> dict[str, float]:
        """Make one optimizer step on the next batch; return its loss, gradient norm, learning rate and bytes."""
        batch = next(self._batches)
        loss = self._loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm))
        self.optimizer.step()
        lr = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        return {"loss": loss.item(), "grad_norm": norm, "lr": float(lr), "bytes": float(batch[:, 1:].numel())}

    @torch.no_grad()
    def evaluate(self, suite: str) -> dict[str, float]:
        """Measure the loss on held-out files: "quick" on 64 KiB of them, "full" on all.

        "unigram_entropy" is the lowest loss that a model without context can reach on the same bytes. Raises ValueError
        for another suite.
        """
        if suite not in {"quick", "full"}:
            raise ValueError(f'there is no evaluation set {suite!r}: use "quick" or "full"')
        context, windows = self.held_out.context, len(self.held_out)
        stride = max(1, windows * context // _QUICK_BYTES) if suite == "quick" else 1
        chosen = iter(range(0, windows, stride))
        total, counts, training = 0.0, torch.zeros(_BYTES, dtype=torch.int64), self.model.training
        self.model.eval()
        try:
            while indices := list(islice(chosen, self.batch_size)):
                batch = torch.stack([self.held_out[index] for index in indices])
                total += self._loss(batch).item() * batch[:, 1:].numel()
                counts += torch.bincount(batch[:, 1:].flatten(), minlength=_BYTES)
        finally:
            self.model.train(training)
        share = counts.double() / counts.sum()
        return {
            "heldout_loss": total / int(counts.sum()),
            "unigram_entropy": -torch.special.xlogy(share, share).sum().item(),
            "heldout_bytes": float(counts.sum()),
        }

    def _loss(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.device)
        logits: Tensor = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def use_deterministic_kernels() -> None:
    """Make a CUDA device compute the same bits every time; some of its fastest kernels add in any order."""
    # CUDA reads this variable at a process's first matrix product on a device.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def read(data: str | None, max_bytes: int) -> tuple[bytes, bytes]:
    """Read the files and return training bytes and held-out bytes, with a zero byte after each file.

    The order of the files and the choice of held-out files depend only on their names relative to the directory (for a
    glob, to the part before the first wildcard), so the data may be moved. Raises ValueError for fewer than two files.
    """
    named = sorted((hashlib.blake2b(name.encode()).digest(), path) for name, path in _files(data))
    if len(named) < 2:
        raise ValueError(f"{data or 'the standard library'}: {len(named)} files found, and at least 2 are needed")
    # The files with the lowest hashes are held out: at least one file, but never all.
    count = sum(int.from_bytes(digest[:8]) < 2**64 // _HELD_OUT_PARTS for digest, _ in named)
    count = min(max(1, count), len(named) - 1)
    held_out = _joined([path for _, path in named[:count]], max_bytes // 64)
    return _joined([path for _, path in named[count:]], max_bytes - len(held_out)), held_out


def _files(data: str | None) -> Iterator[tuple[str, Path]]:
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = []
        for folder, inner, names in os.walk(root):
            inner[:] = set(inner) - _LEFT_OUT  # os.walk visits only the folders that stay in this list.
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
    elif glob.has_magic(data):
        parts = Path(data).parts
        root = Path(*parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
        paths = [Path(path) for path in glob.glob(data, recursive=True)]
    else:
        root = Path(data)
        paths = list(root.rglob("*"))
    return ((path.relative_to(root).as_posix(), path) for path in paths if path.is_file())


def _joined(paths: list[Path], max_bytes: int) -> bytes:
    joined = bytearray()
    for path in paths:
        if len(joined) >= max_bytes:
            break
        joined += path.read_bytes() + b"\0"
    return bytes(joined[:max_bytes])

"""Recurrent and scan models: LSTM, GRU, cells written by hand, a selective scan, an attending seq2seq."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RecurrentLM(nn.Module):
    """A language model around `nn.LSTM` or `nn.GRU` with dropout between its layers."""

    def __init__(self, kind: str, *, vocabulary: int = 64, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        rnn_type = {"lstm": nn.LSTM, "gru": nn.GRU}[kind]
        self.rnn = rnn_type(dim, dim, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-token scores."""
        hidden, _ = self.rnn(self.embed(tokens))
        scores: Tensor = self.head(hidden)
        return scores


class HandLSTM(nn.Module):
    """An LSTM written out: gates are `unsafe_chunk` views of one storage, activated in place."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.inputs = nn.Linear(dim, 4 * dim)
        self.hidden = nn.Linear(dim, 4 * dim)
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of a sequence in (time, batch, dim) order."""
        state = x.new_zeros(x.shape[1:])
        cell = x.new_zeros(x.shape[1:])
        outputs = []
        for item in x.unbind(0):
            gates = self.inputs(item) + self.hidden(state)
            enter, forget, new, leave = gates.unsafe_chunk(4, 1)
            enter, forget, leave = enter.sigmoid_(), forget.sigmoid_(), leave.sigmoid_()
            cell = forget * cell + enter * new.tanh_()
            state = leave * cell.tanh()
            outputs.append(state)
        result: Tensor = self.head(torch.stack(outputs))
        return result


class CellRNN(nn.Module):
    """A loop over `nn.LSTMCell` and `nn.GRUCell`."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(dim, dim)
        self.gru = nn.GRUCell(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of a sequence in (time, batch, dim) order."""
        state = cell = top = x.new_zeros(x.shape[1:])
        outputs = []
        for item in x:
            state, cell = self.lstm(item, (state, cell))
            top = self.gru(state, top)
            outputs.append(top)
        return torch.stack(outputs)


class SelectiveScan(nn.Module):
    """A Mamba-like block (Gu and Dao, 2023): gated, input-dependent state space, scanned by a Python loop."""

    def __init__(self, dim: int = 48, state: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.enter = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, 4, padding=3, groups=dim)
        self.select = nn.Linear(dim, 2 * state + 1)
        self.log_decay = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(dim, 1))
        self.skip = nn.Parameter(torch.ones(dim))
        self.leave = nn.Linear(dim, dim)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output added to its input, in (batch, time, dim) order."""
        length = x.shape[1]
        signal, gate = self.enter(self.norm(x)).chunk(2, -1)
        signal = functional.silu(self.conv(signal.transpose(1, 2))[..., :length].transpose(1, 2))
        rate, write, read = self.select(signal).split([1, self.state, self.state], -1)
        rate = functional.softplus(rate)
        decay = torch.exp(rate.unsqueeze(-1) * -torch.exp(self.log_decay))
        drive = (rate * signal).unsqueeze(-1) * write.unsqueeze(2)
        memory = torch.zeros_like(drive[:, 0])
        outputs = []
        for t in range(length):
            memory = decay[:, t] * memory + drive[:, t]
            outputs.append((memory * read[:, t].unsqueeze(1)).sum(-1))
        mixed = torch.stack(outputs, 1) + self.skip * signal
        result: Tensor = x + self.leave(mixed * functional.silu(gate))
        return result


class Seq2Seq(nn.Module):
    """A GRU encoder and decoder with additive attention and teacher forcing."""

    def __init__(self, vocabulary: int = 48, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * dim, dim)
        self.score = nn.Linear(2 * dim, 1)
        self.cell = nn.GRUCell(2 * dim, dim)
        self.head = nn.Linear(dim, vocabulary)
        self.dropout = nn.Dropout(0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return next-token scores for the target."""
        encoded, _ = self.encoder(self.embed(source))
        encoded = torch.tanh(self.bridge(encoded))
        state = encoded.mean(1)
        outputs = []
        for item in self.dropout(self.embed(target)).unbind(1):
            query = state.unsqueeze(1).expand_as(encoded)
            weights = self.score(torch.cat([query, encoded], -1)).softmax(1)
            context = (weights * encoded).sum(1)
            state = self.cell(torch.cat([item, context], -1), state)
            outputs.append(state)
        scores: Tensor = self.head(torch.stack(outputs, 1))
        return scores


class Adversaries(nn.Module):
    """A generator and a discriminator for 32x32 images, to be trained against each other."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        w = width
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 4 * w, 4), nn.BatchNorm2d(4 * w), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * w, w, 4, 2, 1), nn.BatchNorm2d(w), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(w, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w), nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(128 * w, 1),
        )  # fmt: skip

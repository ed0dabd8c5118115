"""A recurrent encoder-decoder with additive attention (Bahdanau et al., ICLR 2015), trained by teacher forcing.

Each of the decoder's steps adds its query to the projected encoder states of the whole source, squashes the sum and
reduces it to one score a position. Autograd saves that (batch, source, hidden) sum for every target position, which
takes O(target x source x batch x hidden) bytes: far more than all the rest for long sentences.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AdditiveAttention(nn.Module):
    """Weights encoder states by `v . tanh(W_key state + W_query query)`.

    Args:
        hidden: Width of queries, keys and states.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, states: Tensor) -> Tensor:
        """Return the context, of shape (batch, hidden).

        Args:
            query: (batch, hidden).
            keys: The projected states, (batch, source, hidden).
            states: (batch, source, hidden).
        """
        scores = self.score(torch.tanh(keys + self.query(query).unsqueeze(1))).squeeze(-1)
        context: Tensor = torch.bmm(F.softmax(scores, 1).unsqueeze(1), states).squeeze(1)
        return context


class Seq2SeqAttention(nn.Module):
    """An LSTM encoder, and an LSTM decoder that attends to it at each step.

    Args:
        vocabulary: Tokens of both languages.
        hidden: Width of embeddings and states.
        layers: Layers of the encoder.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, hidden)
        self.target = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.attention = AdditiveAttention(hidden)
        self.decoder = nn.LSTMCell(2 * hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the scores of the next tokens, (batch, target, vocabulary), given the true ones before them."""
        states, (last, cells) = self.encoder(self.source(source))
        keys = self.attention.key(states)
        state, cell = last[-1], cells[-1]
        outputs = []
        for item in self.target(target).unbind(1):
            context = self.attention(state, keys, states)
            state, cell = self.decoder(torch.cat([item, context], 1), (state, cell))
            outputs.append(state)
        scores: Tensor = self.head(torch.stack(outputs, 1))
        return scores


def seq2seq_attention(*, vocabulary: int = 16_000, hidden: int = 1024, layers: int = 2) -> Seq2SeqAttention:
    """A translation model of the size that was usual in 2017."""
    return Seq2SeqAttention(vocabulary, hidden, layers)

"""Small decoders with one habit each that an engine could trip over: shared modules, detours, changes in place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, DEPTH, HEADS = 40, 16, 3, 4


class Config(SimpleNamespace):
    def get_text_config(self) -> Config:
        return self


class Block(nn.Module):
    """A causal block with LayerNorm, one attention head and biases; the cases override its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (True, False, True, True))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.mT / math.sqrt(q.shape[-1]) + bias).masked_fill(later, -1e9).softmax(-1) @ v

    def attend(self, x: Tensor) -> Tensor:
        return self.o(self.mix(self.q(x), self.k(x), self.v(x)))

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln1(x))
        return x + self.feed(self.ln2(x))


class Body(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def enter(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        return (self.norm(self.run(self.enter(input_ids))),)


class Decoder(nn.Module):
    """What the engine asks of a model of transformers, and no more."""

    def __init__(self, body: type[Body] = Body, block: type[Block] = Block, *, tied: bool = False) -> None:
        super().__init__()
        self.config = Config(vocab_size=VOCAB, num_hidden_layers=DEPTH)
        self.model = body(block)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed.weight

    base_model = property(lambda self: self.model)
    device = property(lambda self: self.model.embed.weight.device)
    dtype = property(lambda self: self.model.embed.weight.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.model(input_ids)[0]))


EXACT: dict[str, Callable[[], Decoder]] = {}
"""Cases that the engine must measure exactly."""
REFUSED: dict[str, Callable[[], Decoder]] = {}
"""Cases that it may refuse, by a clear error or by its self-check, but never measure wrongly."""


def make(name: str) -> Decoder:
    """The case in float64 and eval mode, every parameter off its initial value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (EXACT | REFUSED)[name]().double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def exact(build: Callable[[], Decoder]) -> Callable[[], Decoder]:
    EXACT[build.__name__] = build
    return build


def refused(build: Callable[[], Decoder]) -> Callable[[], Decoder]:
    REFUSED[build.__name__] = build
    return build


# Parameters that are shared, wrapped, or used by somebody else.


@exact
def plain() -> Decoder:
    return Decoder()


@exact
def tied_head_with_a_bias() -> Decoder:
    model = Decoder(tied=True)
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    return model


@exact
def table_shared_three_ways() -> Decoder:
    class Model(Decoder):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.other = nn.Linear(WIDTH, VOCAB, bias=False)
            self.other.weight = self.lm_head.weight

        def head(self, hidden: Tensor) -> Tensor:
            return self.lm_head(hidden) + 0.3 * self.other(hidden.flip(-1))

    return Model()


@exact
def weights_shared_by_modules() -> Decoder:
    model = Decoder()
    first, second, third = model.model.layers
    third.up.weight, second.ln1.weight = first.up.weight, first.ln2.weight
    return model


@exact
def attention_shared_by_all_blocks() -> Decoder:
    model = Decoder()
    for layer in model.model.layers[1:]:
        layer.q, layer.k, layer.v, layer.o = (getattr(model.model.layers[0], name) for name in "qkvo")
    return model


@exact
def feed_forward_shared_by_all_blocks() -> Decoder:
    model = Decoder()
    for layer in model.model.layers[1:]:
        layer.up, layer.down, layer.ln2 = (getattr(model.model.layers[0], name) for name in ("up", "down", "ln2"))
    return model


@exact
def module_called_by_both_halves_of_the_block() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            return super().feed(x) + self.q(x)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attend(self.ln1(x))
            return x + self.feed(self.ln1(x))

    return Decoder(block=B)


@exact
def module_called_twice_in_the_feed_forward() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)) * self.up(x.flip(-1)))

    return Decoder(block=B)


@exact
def weights_used_without_their_module() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)

    return Decoder(block=B)


@exact
def vectors_owned_by_the_block() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.scale * self.attend(self.ln1(x))
            return x + self.feed(self.ln2(x))

    return Decoder(block=B)


@exact
def parametrised_linear() -> Decoder:
    model = Decoder()
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.up)
    return model


@exact
def weight_made_by_a_hook() -> Decoder:
    model = Decoder()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # That this weight_norm is deprecated; checkpoints still have it.
        for layer in model.model.layers:
            nn.utils.weight_norm(layer.up)
    return model


@exact
def linear_with_a_parameter_more() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.gain = nn.Parameter(torch.ones(2 * WIDTH))

        def feed(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x) * self.up.gain))

    return Decoder(block=B)


@exact
def outputs_changed_by_hooks() -> Decoder:
    model = Decoder()
    for layer in model.model.layers:
        layer.up.register_forward_hook(lambda module, args, output: 2 * output)
        layer.ln1.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))
    return model


@exact
def low_rank_adapters() -> Decoder:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    model = Decoder()
    for layer in model.model.layers:
        layer.q, layer.up = Adapted(layer.q), Adapted(layer.up)
    return model


@exact
def frozen_subset() -> Decoder:
    model = Decoder(tied=True)
    for parameter in (model.model.embed.weight, *model.model.layers[0].parameters()):
        parameter.requires_grad_(False)
    return model


@exact
def module_that_is_never_called() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(WIDTH, WIDTH)

    return Decoder(block=B)


@refused
def weight_used_by_its_module_and_without_it() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            return super().feed(x) * self.ln2.weight + F.linear(x, self.q.weight)

    return Decoder(block=B)


@refused
def table_used_as_a_head_without_a_module() -> Decoder:
    class Model(Decoder):
        def head(self, hidden: Tensor) -> Tensor:
            return F.linear(hidden, self.model.embed.weight)

    model = Model()
    del model.lm_head
    return model


@refused
def one_block_called_three_times() -> Decoder:
    class Shared(Body):
        def __init__(self, block: type[Block]) -> None:
            super().__init__(block)
            self.layers = nn.ModuleList([self.layers[0]] * DEPTH)

    return Decoder(Shared)


# Embeddings.


@exact
def scaled_and_padded_embedding() -> Decoder:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 4.0

    model = Decoder(tied=True)
    model.model.embed = Scaled(VOCAB, WIDTH, padding_idx=7)
    model.model.embed.weight = model.lm_head.weight
    return model


@exact
def clamped_embedding() -> Decoder:
    class Clamped(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).clamp(-1.5, 1.5)

    model = Decoder()
    model.model.embed = Clamped(VOCAB, WIDTH)
    return model


@exact
def embedding_called_twice() -> Decoder:
    class B(Body):
        def enter(self, ids: Tensor) -> Tensor:
            return self.embed(ids) + 0.5 * self.embed((ids + 1) % VOCAB)

    return Decoder(B, tied=True)


@exact
def embedding_changed_in_place() -> Decoder:
    class B(Body):
        def __init__(self, block: type[Block]) -> None:
            super().__init__(block)
            self.positions = nn.Embedding(64, WIDTH)

        def enter(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x *= 4.0
            x += self.positions(torch.arange(ids.shape[1]))
            return x

    return Decoder(B)


@exact
def positions_as_a_parameter() -> Decoder:
    class B(Body):
        def __init__(self, block: type[Block]) -> None:
            super().__init__(block)
            self.positions = nn.Parameter(torch.randn(1, 64, WIDTH))

        def enter(self, ids: Tensor) -> Tensor:
            return self.embed(ids) + self.positions[:, : ids.shape[1]]

    return Decoder(B)


@exact
def table_of_relative_positions() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.relative = nn.Embedding(16, 1)

        def attend(self, x: Tensor) -> Tensor:
            s = torch.arange(x.shape[1])
            bias = self.relative((s[:, None] - s).clamp(0, 15))[..., 0]
            return self.o(self.mix(self.q(x), self.k(x), self.v(x), bias))

    return Decoder(block=B)


# Rows that are not positions.


class Routed(Block):
    """Top-1 routing over separate linear modules; an expert that no position chose is left out."""

    skip = True

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def feed(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weight, choice = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index).nonzero()[:, 0]
            if len(chosen) or not self.skip:
                out = out.index_add(0, chosen, expert(rows[chosen]) * weight[chosen, None])
        return super().feed(x) + out.reshape(x.shape)


@exact
def experts_left_out_where_not_chosen() -> Decoder:
    return Decoder(block=Routed)


@exact
def experts_called_without_rows() -> Decoder:
    class B(Routed):
        skip = False

    return Decoder(block=B)


@exact
def rows_sorted_by_content() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            order = x[0, :, 0].argsort()
            return self.down(F.gelu(self.up(x[:, order])))[:, order.argsort()]

    return Decoder(block=B)


@exact
def modules_that_see_heads_before_positions() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qn, self.kl = nn.LayerNorm(WIDTH // HEADS), nn.Linear(WIDTH // HEADS, WIDTH // HEADS)

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
            return self.o(self.mix(self.qn(q), self.kl(k), v).transpose(1, 2).flatten(2))

    return Decoder(block=B)


@exact
def linear_of_a_constant() -> Decoder:
    class B(Body):
        def __init__(self, block: type[Block]) -> None:
            super().__init__(block)
            self.one, self.many = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH)

        def enter(self, ids: Tensor) -> Tensor:
            ones = torch.ones(1, 4, dtype=self.embed.weight.dtype)
            return self.embed(ids) + self.one(ones[0]) + self.many(ones)[:, None].tanh()

    return Decoder(B)


@exact
def branches_without_a_gradient() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 1)

        def feed(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                gate = self.gate(x).sigmoid()
            return super().feed(x.detach()) * gate

    return Decoder(block=B)


# What happens between the modules.


@exact
def activations_changed_in_place() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x), inplace=True))

    return Decoder(block=B)


@exact
def residual_that_depends_on_the_position() -> Decoder:
    class Ramp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * (1 + torch.arange(x.shape[1])[:, None] / 10)

    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.ramp = Ramp()

        def forward(self, x: Tensor) -> Tensor:
            x = x * (1 + torch.arange(x.shape[1])[:, None] / 100) + self.attend(self.ln1(x))
            return x + self.feed(self.ln2(x) + self.ramp(x))

    return Decoder(block=B)


@exact
def convolution_and_token_shift() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

        def feed(self, x: Tensor) -> Tensor:
            before = F.pad(x, (0, 0, 1, 0))[:, :-1]
            return self.down(F.gelu(self.up(x + before + self.conv(F.pad(x.mT, (2, 0))).mT)))

    return Decoder(block=B)


@exact
def first_values_reused_by_every_block() -> Decoder:
    class B(Block):
        def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
            h = self.ln1(x)
            v = self.v(h)
            first = v if first is None else first
            x = x + self.o(self.mix(self.q(h), self.k(h), v + first))
            return x + self.feed(self.ln2(x)), first

    class Reusing(Body):
        def run(self, x: Tensor) -> Tensor:
            first = None
            for layer in self.layers:
                x, first = layer(x, first)
            return x

    return Decoder(Reusing, B)


@exact
def embeddings_passed_to_every_block() -> Decoder:
    class B(Block):
        def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
            x = x + self.attend(self.ln1(x))
            return x + self.feed(self.ln2(x + embedded))

    class Passing(Body):
        def run(self, x: Tensor) -> Tensor:
            embedded = x
            for layer in self.layers:
                x = layer(x, embedded)
            return x

    return Decoder(Passing, B)


@exact
def skip_to_the_input_of_the_last_block() -> Decoder:
    class Skipping(Body):
        def run(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            return self.layers[2](self.layers[1](first) + 0.5 * first)

    return Decoder(Skipping)


class NumpySine(torch.autograd.Function):
    """Its backward leaves torch: vmap can't carry it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.numpy() * ctx.saved_tensors[0].detach().cos().numpy())


@exact
def operation_that_cannot_be_batched() -> Decoder:
    class B(Block):
        def attend(self, x: Tensor) -> Tensor:
            return super().attend(NumpySine.apply(x))

    return Decoder(block=B)


@exact
def dropout_left_in_training_mode() -> Decoder:
    class B(Block):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def feed(self, x: Tensor) -> Tensor:
            return self.dropout(super().feed(x))

    return Decoder(block=B)


@refused
def dropout_that_never_ends() -> Decoder:
    class B(Block):
        def feed(self, x: Tensor) -> Tensor:
            return F.dropout(super().feed(x), 0.3, training=True)

    return Decoder(block=B)


@refused
def skip_over_the_last_block() -> Decoder:
    class Skipping(Body):
        def run(self, x: Tensor) -> Tensor:
            return super().run(x) + 0.5 * x

    return Decoder(Skipping)


# Heads.


@exact
def head_with_layers_of_its_own() -> Decoder:
    class Model(Decoder):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            self.temperature = nn.Parameter(torch.tensor([1.3]))

        def head(self, hidden: Tensor) -> Tensor:
            logits = self.lm_head(self.norm(hidden + F.gelu(self.dense(hidden)))) * self.temperature
            return 8 * torch.tanh(logits / 8)

    return Model()


@exact
def head_that_calls_its_modules_twice() -> Decoder:
    class Model(Decoder):
        def head(self, hidden: Tensor) -> Tensor:
            hidden = self.model.norm(hidden)
            return self.lm_head(hidden) + 0.5 * self.lm_head(hidden.flip(-1))

    return Model(tied=True)


@refused
def head_that_mixes_positions() -> Decoder:
    class Model(Decoder):
        def head(self, hidden: Tensor) -> Tensor:
            return self.lm_head(hidden + hidden.cumsum(1))

    return Model()

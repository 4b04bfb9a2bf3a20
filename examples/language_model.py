"""Replay for a language model: expressions that evaluate to the number in the prompt.

A small transformer learns lines "number=expression" for a few seconds. This reference solves about
one prompt of twenty. Post-training samples in proportion to p_ref(y | x) exp(r / beta), where r is
1 for an expression of the right value: strictly on-policy, or with replay. With replay, searchers
complete prompts with slightly old weights and send rows to the trainer, whose buffer a manager
fills. The trainer draws recent rows and rows of high reward for each prompt, and sends weights
back.

python examples/language_model.py replay --tokens 60000
python examples/language_model.py on-policy --tokens 60000
mpiexec -n 3 python -m mpi4py examples/language_model.py replay
"""

import argparse
import copy
import math
import multiprocessing
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchrl.data import ReplayBuffer

from gfn_rb import fifo_buffer
from gfn_rb.losses import clipped_ratio, completion_log_prob, group_residual
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, decode_frame, encode_frame
from gfn_rb.transports import MPITransport, TCPTransport, Transport
from gfn_rb.transports.base import SendHandle
from gfn_rb.transports.launch import launched

ALPHABET = "0123456789+-*= "
END = ALPHABET.index(" ")  # ends a completion, and pads it
LENGTH = 8  # tokens of a completion at most, the end included
EXPRESSION = re.compile(r"[1-9]\d*([-+*][1-9]\d*){2,}")  # of three numbers at least
N_PROMPTS, N_EACH = 8, 8  # of a batch: prompts, and completions of each
PRETRAIN_STEPS = 200
PATIENCE = 300.0  # seconds that processes wait for each other
WEIGHTS = 3  # tag of messages with weights; a manager uses those below
Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [n, heads, T, width]


class Layer(nn.Module):
    """Causal self-attention and a perceptron, both with a residual connection."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return features [n, T, width], and the keys and values of all positions so far."""
        n, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, length, 3, self.n_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if before is not None:
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        # A single new position sees all others; several are only given at the start.
        y = F.scaled_dot_product_attention(query, key, value, is_causal=before is None)
        x = x + self.out(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x)), (key, value)


class LanguageModel(nn.Module):
    """A transformer over characters."""

    def __init__(self, width: int = 64, n_layers: int = 2, n_heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Parameter(0.02 * torch.randn(3 + LENGTH, width))
        self.layers = nn.ModuleList(Layer(width, n_heads) for _ in range(n_layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return logits [n, T, V] of the next tokens, and the cache to continue with."""
        start = cache[0][0].shape[2] if cache else 0
        x = self.token(tokens) + self.place[start : start + tokens.shape[1]]
        after: Cache = []
        for i, layer in enumerate(self.layers):
            x, entry = layer(x, cache[i] if cache else None)
            after.append(entry)
        return self.head(x), after


def encode(texts: Sequence[str]) -> Tensor:
    """Return tokens [n, T] of texts of one length."""
    return torch.tensor([[ALPHABET.index(c) for c in text] for text in texts])


def is_token(completion: Tensor) -> Tensor:
    """Return which tokens belong to completions [n, T]: up to the first end."""
    is_end = completion == END
    return is_end.cumsum(1) - is_end.long() == 0


def completion_logits(model: LanguageModel, prompt: Tensor, completion: Tensor) -> Tensor:
    """Return logits [n, LENGTH, len(ALPHABET)] for each token of completions [n, LENGTH]."""
    logits, _ = model(torch.cat([prompt, completion[:, :-1]], 1))
    return logits[:, prompt.shape[1] - 1 :]


@torch.no_grad()
def complete(
    model: LanguageModel, prompt: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a completion [n, LENGTH] of each prompt [n, P], and return its log-probability [n]."""
    n = len(prompt)
    completion = torch.full((n, LENGTH), END)
    log_prob, is_open = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    cache, given = None, prompt
    for step in range(LENGTH):
        logits, cache = model(given, cache)
        log_p = logits[:, -1].log_softmax(-1)
        token = log_p.exp().multinomial(1, generator=generator)
        log_prob += log_p.gather(1, token)[:, 0].where(is_open, 0)
        completion[:, step] = token[:, 0].where(is_open, END)
        is_open &= token[:, 0] != END
        if not is_open.any():
            break
        given = token
    return completion, log_prob


def value_of(text: str) -> int | None:
    """Return the value of a text, None unless it is an expression of three numbers or more."""
    return eval(text) if EXPRESSION.fullmatch(text) else None  # noqa: S307


def decode(completion: Tensor) -> list[str]:
    """Return the texts of completions."""
    return ["".join(ALPHABET[i] for i in row).rstrip() for row in completion.tolist()]


def prompt_of(target: int) -> str:
    """Return the prompt of a number: its last two digits and the sign of equality."""
    return f"{target % 100:02d}="


def random_expression(generator: random.Random) -> str:
    """Return an expression of three or four numbers that fits a completion."""
    while True:
        text = str(generator.randint(1, 9))
        for _ in range(generator.randint(2, 3)):
            text += generator.choice("+-*") + str(generator.randint(1, 9))
        if len(text) < LENGTH:
            return text


def pretrain(n_steps: int, seed: int = 0) -> LanguageModel:
    """Return a model of random expressions behind their value, frozen."""
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, n_steps)
    for _ in range(n_steps):
        texts = [random_expression(numbers) for _ in range(128)]
        completion = encode([text.ljust(LENGTH) for text in texts])
        prompt = encode([prompt_of(value_of(text)) for text in texts])
        logits = completion_logits(model, prompt, completion)
        mask = is_token(completion)
        loss = F.cross_entropy(logits[mask], completion[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        tokens: number of tokens to generate.
        seed: seed of prompts, completions and draws.
        beta: weight of the divergence from the reference; a solution has a log-reward of 1 / beta.
        lr: learning rate of Adam.
        targets: numbers to find expressions for.
        capacity: rows of the buffer.
        max_age: age in versions beyond which rows are removed.
        replay_ratio: updates for each batch of rows that arrives.
        by_reward: share of a draw that is drawn by reward instead of recency.
        half_life: age in versions at which a row is drawn half as often, by recency.
        clip: largest importance weight.
        n_searchers: processes that generate.
    """

    tokens: int = 60_000
    seed: int = 0
    beta: float = 0.125
    lr: float = 1e-3
    targets: tuple[int, ...] = tuple(range(10, 26))
    capacity: int = 8192
    max_age: int = 100
    replay_ratio: int = 4
    by_reward: float = 0.5
    half_life: float = 4.0
    clip: float = 1.0
    n_searchers: int = 2


def search(
    model: LanguageModel, options: Options, version: int, numbers: torch.Generator
) -> TensorDict:
    """Return rows: completions of some prompts, with rewards and the log-probability of each."""
    chosen = torch.randperm(len(options.targets), generator=numbers)[:N_PROMPTS]
    target = torch.tensor(options.targets)[chosen].repeat_interleave(N_EACH)
    prompt = encode([prompt_of(number) for number in target.tolist()])
    completion, log_prob = complete(model, prompt, numbers)
    value = [value_of(text) for text in decode(completion)]
    solved = [each == number for each, number in zip(value, target.tolist(), strict=True)]
    rows = {
        "condition": target,
        "state": completion,
        "log_prob": log_prob,
        "log_reward": torch.tensor(solved) / options.beta,
        "policy_version": torch.full_like(target, version),
    }
    return TensorDict(rows, [len(target)])


@dataclass
class Trainer:
    """The policy, its optimizer, and a record of what was generated."""

    reference: LanguageModel
    options: Options
    tokens: int = 0
    record: list[dict[str, float]] = field(default_factory=list)
    solutions: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.reference).requires_grad_(True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.options.lr)
        self.losses: list[float] = []
        self.start = time.process_time()

    def note(self, rows: TensorDictBase, sender: int = 0) -> dict[str, Tensor]:
        """Record rows that were generated; a manager calls it as its scoring function."""
        solved = rows["log_reward"] > 0
        texts = decode(rows["state"][solved])
        self.solutions.update(zip(rows["condition"][solved].tolist(), texts, strict=True))
        self.tokens += int(is_token(rows["state"]).sum())
        self.record.append(
            {
                "tokens": self.tokens,
                "seconds": time.process_time() - self.start,
                "reward": float(solved.float().mean()),
                "solutions": len(self.solutions),
            }
        )
        return {}

    def update(self, rows: TensorDictBase) -> None:
        """Take one step on rows, which any policy may have made."""
        completion, mask = rows["state"], is_token(rows["state"])
        prompt = encode([prompt_of(number) for number in rows["condition"].tolist()])
        log_prob, reference = (
            completion_log_prob(completion_logits(each, prompt, completion), completion, mask)
            for each in (self.model, self.reference)
        )
        weight = clipped_ratio(log_prob, rows["log_prob"], self.options.clip)
        residual = group_residual(
            log_prob, reference, rows["log_reward"], rows["condition"], weight
        )
        loss = (weight * residual.square()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def on_policy(trainer: Trainer) -> None:
    """Generate and take one step in turn."""
    numbers = torch.Generator().manual_seed(trainer.options.seed)
    while trainer.tokens < trainer.options.tokens:
        rows = search(trainer.model, trainer.options, len(trainer.losses), numbers)
        trainer.note(rows)
        trainer.update(rows)


def replay(trainer: Trainer, transport: Transport) -> dict[str, float]:
    """Keep what searchers send, take steps on draws of it, and send weights back."""
    options, model = trainer.options, trainer.model
    rb = fifo_buffer(
        options.capacity,
        unique="state",
        keep=["log_prob"],
        max_age=options.max_age,
        statistics=True,
    )
    manager = ReplayBufferManager(transport, rb, trainer.note, duplicates="keep")
    numbers = torch.Generator().manual_seed(options.seed)
    searchers = [rank for rank in range(transport.size) if rank != transport.rank]
    sent: dict[int, SendHandle] = {}
    while trainer.tokens < options.tokens:
        weights = parameters_to_vector(model.parameters()).detach()[None]
        rows = TensorDict({"weights": weights}, [1])
        for rank in searchers:
            if rank not in sent or sent[rank].done():
                frame = encode_frame(0, rows, {"version": rb.policy_version})
                sent[rank] = transport.isend(frame, rank, WEIGHTS)
        n_batches = manager.batches
        while manager.batches == n_batches:
            manager.step(1.0)
        for _ in range(options.replay_ratio * (manager.batches - n_batches)):
            rows = draw(rb, options, numbers)
            rb.count_drawn(rows)
            trainer.update(rows)
        rb.policy_version += 1
    for rank in searchers:
        transport.isend(encode_frame(0, meta={"stop": True}), rank, WEIGHTS)
    manager.run(timeout=PATIENCE)
    return rb.stats()


def draw(rb: ReplayBuffer, options: Options, numbers: torch.Generator) -> TensorDictBase:
    """Draw rows of some prompts: by reward, and by recency with a weight that halves with age."""
    rows = rb.storage[:]
    prompts = rows["condition"].unique()
    chosen = prompts[torch.randperm(len(prompts), generator=numbers)[:N_PROMPTS]]
    n_by_reward = round(options.by_reward * N_EACH)
    by_age = rows["policy_version"] * math.log(2) / options.half_life
    index = []
    for log_weight, n in ((rows["log_reward"], n_by_reward), (by_age, N_EACH - n_by_reward)):
        noise = torch.rand(len(chosen), len(rows), generator=numbers).log().neg().log()
        is_other = rows["condition"] != chosen[:, None]
        index.append((log_weight - noise).masked_fill(is_other, -math.inf).topk(n).indices)
    return rows[torch.cat(index, 1).flatten()]


def work(transport: Transport, options: Options) -> None:
    """Complete prompts with the newest weights, and send the rows, until told to stop."""
    torch.set_num_threads(1)
    model = LanguageModel().requires_grad_(False)
    numbers = torch.Generator().manual_seed(options.seed + 1000 * transport.rank)
    message = transport.recv(0, WEIGHTS)
    with ReplayBufferWorker(transport, 0, keep=["log_prob"], timeout=PATIENCE) as worker:
        while True:
            frame = decode_frame(message.data)
            if "stop" in frame.meta:
                return
            vector_to_parameters(frame.rows["weights"][0], model.parameters())
            version = frame.meta["version"]
            while not transport.probe(0, WEIGHTS):
                worker.extend(search(model, options, version, numbers))
            while transport.probe(0, WEIGHTS):
                message = transport.recv(0, WEIGHTS)


def work_over_sockets(file: str, rank: int, options: Options) -> None:
    """Work in a process that the trainer started."""
    where, size = f"file://{file}", 1 + options.n_searchers
    with TCPTransport(where, rank, size, timeout=PATIENCE) as transport:
        work(transport, options)


def replay_in_processes(trainer: Trainer) -> dict[str, float]:
    """Start searchers as processes, and replay what they send."""
    options, context = trainer.options, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file, size = f"{folder}/store", 1 + options.n_searchers
        processes = [
            context.Process(target=work_over_sockets, args=(file, 1 + i, options), daemon=True)
            for i in range(options.n_searchers)
        ]
        for process in processes:
            process.start()
        with TCPTransport(f"file://{file}", 0, size, timeout=PATIENCE) as transport:
            trainer.start = time.process_time()  # without the start of the processes
            statistics = replay(trainer, transport)
        for process in processes:
            process.join()
    return statistics


def report(trainer: Trainer) -> None:
    """Print averages over ten parts of a run."""
    n = math.ceil(len(trainer.record) / 10)
    for start in range(0, len(trainer.record), n):
        part = trainer.record[start : start + n]
        last, reward = part[-1], sum(each["reward"] for each in part) / len(part)
        print(
            f"{last['tokens']:>8,} tokens, {last['seconds']:4.0f} s: reward {reward:.3f}, "
            f"{last['solutions']:,} solutions"
        )


def main() -> None:
    """Pretrain, then post-train in the given mode."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=["on-policy", "replay"])
    parser.add_argument("--tokens", type=int, default=Options.tokens)
    parser.add_argument("--seed", type=int, default=Options.seed)
    given = parser.parse_args()
    options = Options(tokens=given.tokens, seed=given.seed)
    torch.set_num_threads(1)
    launch = launched()
    if launch and launch.rank:
        work(MPITransport(), options)
        return
    trainer = Trainer(pretrain(PRETRAIN_STEPS), options)
    if given.mode == "on-policy":
        on_policy(trainer)
    else:
        statistics = replay(trainer, MPITransport()) if launch else replay_in_processes(trainer)
        print(f"mean age of drawn rows: {statistics['mean_age']:.1f} versions")
    report(trainer)


if __name__ == "__main__":
    main()

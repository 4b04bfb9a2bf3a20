"""Best of n per prompt: a language model learns from the best completions of each prompt.

The model is a small table. A real model samples and is scored at the same places. One buffer keeps
the best completions of each prompt, its group, and draws from all prompts equally.

python examples/best_of_n.py
"""

import torch
from torch import Tensor, nn

from gfn_rb import GroupSampler, reward_prioritized_buffer

N_PROMPTS, N_TOKENS, LENGTH, N_SAMPLES, N_KEPT = 6, 8, 5, 16, 4


class TinyModel(nn.Module):
    """Logits of the next token, given the prompt and the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(N_PROMPTS, N_TOKENS + 1, N_TOKENS))

    def forward(self, condition: Tensor, tokens: Tensor) -> Tensor:
        """Return [n, T, N_TOKENS] logits for prompts [n] and tokens [n, T], shifted by a start."""
        before = torch.cat([torch.full_like(tokens[:, :1], N_TOKENS), tokens[:, :-1]], 1)
        return self.table[condition[:, None], before]

    @torch.no_grad()
    def complete(self, condition: Tensor) -> Tensor:
        """Draw a completion [n, LENGTH] for each prompt."""
        tokens = torch.zeros(len(condition), LENGTH, dtype=torch.int64)
        for step in range(LENGTH):
            logits = self(condition, tokens[:, : step + 1])[:, -1]
            tokens[:, step] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        return tokens


def reward(condition: Tensor, tokens: Tensor) -> Tensor:
    """Score completions: a prompt wants its own number everywhere, and some pay less for it."""
    return (tokens == condition[:, None]).float().mean(1) - condition


def main() -> None:
    """Sample n completions of each prompt, keep the best of each, learn from what was kept."""
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    rb = reward_prioritized_buffer(
        N_PROMPTS * N_KEPT,
        group="condition",
        per_group=N_KEPT,
        unique=["condition", "tokens"],
        sampler=GroupSampler("condition", samples_per_group=N_KEPT, small="fill"),
        batch_size=N_PROMPTS * N_KEPT,
    )
    condition = torch.arange(N_PROMPTS).repeat_interleave(N_SAMPLES)
    for round in range(6):
        tokens = model.complete(condition)
        score = reward(condition, tokens)
        rb.extend({"condition": condition, "tokens": tokens, "log_reward": score})
        print(
            f"round {round}: mean reward {score.mean() + 2.5:.2f}, "
            f"of the best {N_KEPT} so far {rb[:]['log_reward'].mean() + 2.5:.2f}"
        )
        for _ in range(10):
            batch = rb.sample()
            logits = model(batch["condition"], batch["tokens"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()

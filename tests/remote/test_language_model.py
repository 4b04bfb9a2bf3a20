"""The example of a language model: its generation is exact, rows arrive, and it learns."""

import threading
from statistics import mean

import pytest
import torch
from factories import seeded

from gfn_rb.losses import completion_log_prob
from gfn_rb.transports import LocalTransport

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example():
    from examples import language_model

    torch.set_num_threads(1)
    return language_model


@pytest.fixture(scope="module")
def reference(example):
    return example.pretrain(60)


def test_generation_with_a_cache_equals_generation_without(example, reference):
    prompt = example.encode([example.prompt_of(number) for number in range(10, 26)])
    completion, log_prob = example.complete(reference, prompt, seeded())
    mask = example.is_token(completion)
    logits = example.completion_logits(reference, prompt, completion)
    again = completion_log_prob(logits, completion, mask)
    torch.testing.assert_close(log_prob, again, atol=1e-4, rtol=1e-4)

    numbers, tokens, is_open = seeded(), prompt, torch.ones(len(prompt), dtype=torch.bool)
    for _ in range(int(mask.sum(1).max())):
        logits, _ = reference(tokens)
        token = logits[:, -1].softmax(-1).multinomial(1, generator=numbers)[:, 0]
        token = token.where(is_open, example.END)
        is_open &= token != example.END
        tokens = torch.cat([tokens, token[:, None]], 1)
    assert torch.equal(tokens[:, 3:], completion[:, : tokens.shape[1] - 3])


def test_rewards_are_those_of_the_expressions(example):
    assert example.value_of("3*4+5") == 17
    assert example.value_of("17") is None
    assert example.value_of("9+8") is None
    assert example.value_of("3*4+05") is None


def test_rows_arrive_and_the_trainer_takes_steps(example, reference):
    options = example.Options(tokens=6_000, replay_ratio=2, targets=tuple(range(10, 18)))
    trainer = example.Trainer(reference, options)
    managing, *working = LocalTransport.group(3)
    threads = [threading.Thread(target=example.work, args=(each, options)) for each in working]
    for thread in threads:
        thread.start()
    statistics = example.replay(trainer, managing)
    for thread in threads:
        thread.join()
    n_batches = len(trainer.record)
    assert trainer.tokens >= options.tokens
    assert statistics["offered"] == n_batches * example.N_PROMPTS * example.N_EACH
    assert len(trainer.losses) >= 2 * (n_batches - len(working))


def test_the_loss_decreases_on_rows_that_stay(example, reference):
    options = example.Options(targets=tuple(range(10, 18)))
    rows = example.search(reference, options, 0, seeded())
    rows["log_reward"][::2] = 1 / options.beta  # so short a training solves few prompts or none
    fixed = example.Trainer(reference, options)
    for _ in range(30):
        fixed.update(rows)
    assert mean(fixed.losses[-5:]) < 0.7 * mean(fixed.losses[:5])

from __future__ import annotations

import math
import pickle
import sys

import pytest
import RNA
import torch

from gfn_rb.envs import RNABinding, rna_binding
from gfn_rb.envs.rna_binding import TARGETS, known_sums, lowest_energy
from gfn_rb.errors import GfnRbError

SHORT = ("GGGCAAUGCC", "AUGGCUUACG")  # short targets, quick to fold


def test_energies_are_those_of_viennarna() -> None:
    env = RNABinding(["RNA1", "RNA3"])
    texts = ["AUGGGCCGGACCCC", "GCCCCGCCGGAAUG", "UCUUGGGGACUUUU", "AAAAAAAAAAAAAA"]
    energy = env.energy(env.parse(texts))
    expected = [[RNA.duplexfold(TARGETS[t], x).energy for t in ("RNA1", "RNA3")] for x in texts]
    alone = [RNABinding([target]).score(env.parse(texts)) for target in ("RNA1", "RNA3")]
    torch.testing.assert_close(env.score(env.parse(texts)), (alone[0] + alone[1]) / 2)
    torch.testing.assert_close(energy, torch.tensor(expected))
    assert energy[3].tolist() == pytest.approx([2.7, 1.5])  # no pair without U in the target's way


def test_scores_by_hand() -> None:
    # E(RNA1 with its complement) = -260.1 kcal/mol over 100 letters: 14 letters' share is -36.414
    env = RNABinding()
    assert lowest_energy(TARGETS["RNA1"]) == pytest.approx(-260.1, abs=0.05)
    state = env.parse(["AUGGGCCGGACCCC", "GGGGGGGGGGGGGG", "AAAAAAAAAAAAAA"])
    r = torch.tensor([19.8, 23.8, -2.7]) / 36.414
    torch.testing.assert_close(env.score(state), r, rtol=1e-4, atol=0)
    floored = torch.tensor([r[0], r[1], 1e-3])
    torch.testing.assert_close(env.log_reward(state), 8 * floored.log(), rtol=1e-4, atol=0)


def test_no_sequence_is_folded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    env = RNABinding(SHORT, 4)
    folded = []
    duplex = rna_binding._duplex
    monkeypatch.setattr(
        rna_binding, "_duplex", lambda t, x: (folded.append((t, x)), duplex(t, x))[1]
    )
    first = env.parse(["GCAU", "AAAA", "GCAU", "GCAU"])
    energy = env.energy(first)
    assert sorted(folded) == sorted((t, x) for t in SHORT for x in ("GCAU", "AAAA"))
    assert energy[0].equal(energy[2])
    env.log_reward(first.flip(0))
    env.modes_reached(env.parse(["AAAA", "GCCU"]))
    assert len(folded) == 6
    assert env.state_dict() == {}
    pickle.loads(pickle.dumps(env)).energy(first)
    assert len(folded) == 6


def test_rewards_known_from_elsewhere_need_no_scoring() -> None:
    """With a threshold that some score exactly, so that rounding the wrong way would show."""
    env = RNABinding(SHORT[:1], 4)
    state = torch.cartesian_prod(*[torch.arange(4)] * 4)
    score, log_reward = env.score(state), env.log_reward(state)
    for threshold in score[score > 0.3].unique().tolist():
        here, elsewhere = (RNABinding(SHORT[:1], 4, threshold=threshold) for _ in range(2))
        known = elsewhere.modes_reached(state, log_reward)
        assert known.equal(here.modes_reached(state))
        assert len(known) == int((score >= threshold - 1e-6).sum())
        assert not elsewhere._energies
    torch.testing.assert_close(env.score(state, log_reward), score.clamp(min=env.min_reward))


def test_known_sums_lead_from_each_beta_to_the_next() -> None:
    sums = known_sums()
    assert len(sums) == 3 * 52
    for (target, beta), (log_z, expected_score) in sums.items():
        if (target, beta + 1) in sums:
            following = sums[target, beta + 1][0]
            assert following == pytest.approx(log_z + math.log(expected_score), abs=2e-5)


def test_known_sums_agree_with_a_sample() -> None:
    env = RNABinding(beta=2.0)
    state = torch.randint(4, (1500, 14), generator=torch.Generator().manual_seed(0))
    score = env.score(state).double().clamp(min=1e-3)
    for beta in (1.0, 2.0, 3.0):
        reward = score**beta
        mean = math.exp(RNABinding(beta=beta).true_log_z - 14 * math.log(4))
        assert reward.mean().item() == pytest.approx(mean, abs=4 * float(reward.std()) / 1500**0.5)
    assert env.expected_score == pytest.approx(
        float((score**3).mean() / (score**2).mean()), rel=0.1
    )


def test_what_is_known_of_a_task() -> None:
    env = RNABinding()
    assert (env.true_log_z, env.expected_score) == (12.38146, 0.5471538)
    env = RNABinding(form="prepend_append", beta=40.0)
    assert (env.true_log_z, env.expected_score) == (5.041795, 0.9737563)
    for options in (
        {"targets": ["RNA4"]},
        {"targets": ["RNA1", "RNA2"]},
        {"length": 13},
        {"beta": 2.5},
        {"min_reward": 0.01},
    ):
        env = RNABinding(**options)
        assert (env.true_log_z, env.expected_score) == (None, None)


def test_a_missing_viennarna_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "RNA", None)
    with pytest.raises(GfnRbError, match="RNABinding needs ViennaRNA: pip install"):
        RNABinding()


def test_the_published_modes_are_found_by_their_states() -> None:
    env = RNABinding(modes="published", form="prepend_append")
    state = env.parse(["AAACGGGGGCCCCG", "AAAGCGCGGGGGCC", "AAAAAAAAAAAAAA"])
    assert env.n_modes == 8967
    assert RNABinding(SHORT).n_modes is None  # nobody has counted them
    assert env.modes_reached(state).equal(env.fingerprint(state[:2]))
    assert env.score(state)[:2].min() > 0.6

"""What Hydra reads from a YAML file, as arguments and as a configuration."""

import pytest
import torch
from tensordict import TensorDict

from gfn_rb import (
    GroupSampler,
    RaggedStorage,
    fifo_buffer,
    load_checkpoint,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.training import TrainConfig
from gfn_rb.training.config import CONFIGS, TFBind8Config
from gfn_rb.training.options import MetricsOptions
from gfn_rb.writers import FIFOWriter

omegaconf = pytest.importorskip("omegaconf")

READ = omegaconf.OmegaConf.create(
    """
keys: [smiles]
nested: [[next, prompt]]
ragged: {tokens: 8, words: 40}
text: [words]
widths: [8, 16]
"""
)


def rows() -> TensorDict:
    prompt = torch.arange(12) // 3
    return TensorDict(
        {"smiles": torch.arange(12) // 2, "next": {"prompt": prompt}, "log_reward": torch.ones(12)},
        [12],
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda keys: reward_prioritized_buffer(20, unique=keys),
        lambda keys: fifo_buffer(20, unique=keys),
        lambda keys: fifo_buffer(20, group=keys, per_group=1),
    ],
    ids=["best", "newest", "groups"],
)
def test_a_list_of_keys_acts_as_one_of_python(make):
    made, plain = make(READ["keys"]), make(["smiles"])
    for rb in (made, plain):
        rb.extend(rows())
    assert len(made) == len(plain) == 6


@pytest.mark.usefixtures("unchecked")
def test_a_key_of_a_nested_entry_is_a_list_in_a_file(tmp_path):
    def make(keys):
        sampler = GroupSampler(keys, num_groups=2)
        return reward_prioritized_buffer(20, group=keys, per_group=2, sampler=sampler)

    made, plain = make(READ.nested), make([("next", "prompt")])
    made.extend(rows())
    assert len(made) == 8
    save_checkpoint(tmp_path / "rb", made)
    load_checkpoint(tmp_path / "rb", plain)
    opened = open_buffer(tmp_path / "rb")
    assert type(opened.writer.group) is list
    assert opened.writer.group == opened.sampler.group == [("next", "prompt")]
    for rb in (plain, opened):
        assert (rb[:].exclude("index") == made[:].exclude("index")).all()


def test_text_of_ragged_rows_is_named_in_a_file():
    storage = RaggedStorage(4, ragged=READ.ragged, text=READ.text)
    rb = fifo_buffer(4, storage=storage)
    rb.extend(TensorDict({"tokens": torch.ones(2, 3), "words": ["a b", "c"]}, [2]))
    assert rb[:]["words"] == ["a b", "c"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", ["words", 3, None])
def test_what_is_no_list_is_refused(wrong):
    with pytest.raises(ArgumentError, match="text must be a list of keys, got"):
        RaggedStorage(4, ragged={"words": 40}, text=wrong)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_list_of_keys_is_refused():
    with pytest.raises(ArgumentError, match=r"unique must be a key, .* got \[3\]"):
        FIFOWriter(omegaconf.OmegaConf.create([3]))


@pytest.mark.parametrize("kind", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_passes_through_a_file(kind, tmp_path):
    omegaconf.OmegaConf.save(omegaconf.OmegaConf.create(kind().to_dict()), tmp_path / "a.yaml")
    read = omegaconf.OmegaConf.load(tmp_path / "a.yaml")
    assert TrainConfig.from_dict(read) == kind()


def test_options_of_a_file_are_replaced_and_checked():
    base = omegaconf.OmegaConf.create(TFBind8Config().to_dict())
    changes = omegaconf.OmegaConf.from_dotlist(["steps=3", "hidden=[8,16]", "keep.kind=recent"])
    config = TrainConfig.from_dict(omegaconf.OmegaConf.merge(base, changes))
    config.validate()
    assert (config.steps, config.hidden, config.keep.kind) == (3, (8, 16), "recent")
    wrong = omegaconf.OmegaConf.merge(base, {"hidden": [8, "wide"]})
    with pytest.raises(ArgumentError, match="hidden must be a whole number, got 'wide'"):
        TrainConfig.from_dict(wrong)


@pytest.mark.usefixtures("unchecked")
def test_a_field_that_is_a_tuple_takes_any_sequence():
    metrics = MetricsOptions(names=omegaconf.OmegaConf.create(["elbo"]))
    for widths in ([8, 16], READ.widths):
        config = TFBind8Config(hidden=widths, metrics=metrics)
        config.validate()
        assert config == TFBind8Config(hidden=(8, 16), metrics=MetricsOptions(names=("elbo",)))

"""Objects told apart by text and by tensors of different lengths, against a Python dict."""

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import TensorDictReplayBuffer

from gfn_rb import FIFOWriter, RaggedStorage, RewardPrioritizedWriter

SIZE = 60
UNIQUE = ["tokens", "state", "text", ["tokens", "text"], ["tokens", "number"], ["text", "number"]]
objects = st.tuples(
    st.lists(st.integers(0, 1), max_size=3),  # tokens
    st.sampled_from(["", "a", "b", "ab", "\u00e9"]),
    st.sampled_from([0.0, -0.0, 1.0]),
)
batches = st.lists(st.lists(objects, min_size=1, max_size=6), min_size=1, max_size=4)


def row(tokens, text, number, serial=0):
    state = torch.tensor(tokens[:2], dtype=torch.int32)[:, None].expand(-1, 2)
    rows = {"tokens": torch.tensor(tokens, dtype=torch.int64), "state": state, "text": text}
    numbers = {"number": torch.tensor([number]), "serial": torch.tensor(serial)}
    return TensorDict({**rows, **numbers, "log_reward": torch.zeros(())})


def identity(tokens, text, number, unique):
    known = {
        "tokens": tuple(tokens), "state": tuple(tokens[:2]), "text": text, "number": number + 0.0
    }  # fmt: skip
    return tuple(known[name] for name in ([unique] if isinstance(unique, str) else unique))


def serials(storage):
    return [int(storage.get(i)["serial"]) for i in range(len(storage))]


@pytest.mark.parametrize("unique", UNIQUE)
@given(
    batches=batches,
    on_duplicate=st.sampled_from(["refresh", "keep"]),
    make=st.sampled_from([RewardPrioritizedWriter, FIFOWriter]),
)
def test_one_row_of_each_content_is_kept(unique, batches, on_duplicate, make):
    def buffer():
        return TensorDictReplayBuffer(
            storage=RaggedStorage(SIZE, {"tokens": 4, "state": 2, "text": 4}, text=["text"]),
            writer=make(unique=unique, on_duplicate=on_duplicate),
        )

    rb, kept, serial = buffer(), {}, 0
    for batch in batches:
        rows = [row(*each, serial + i) for i, each in enumerate(batch)]
        names = [identity(*each, unique) for each in batch]
        last = {name: serial + i for i, name in enumerate(names)}
        known = kept if on_duplicate == "keep" else {}
        kept |= {name: at for name, at in last.items() if name not in known}
        rb.extend(lazy_stack(rows))
        serial += len(rows)
        stored = serials(rb.storage)
        assert sorted(stored) == sorted(kept.values())
        found = rb.writer.slots_of(lazy_stack(rows)).tolist()
        assert [stored[slot] for slot in found] == [kept[name] for name in names]
    again = buffer()  # the index is made from what is stored
    again.load_state_dict(copy.deepcopy(rb.state_dict()))
    assert again.writer.slots_of(lazy_stack(rows)).tolist() == found


def test_forms_of_a_batch_are_of_the_same_objects():
    rb = TensorDictReplayBuffer(
        storage=RaggedStorage(9, {"tokens": 4, "other": "tokens"}),
        writer=RewardPrioritizedWriter(unique=["tokens", "other"]),
    )
    tokens = [torch.arange(n) for n in (0, 3, 2)]
    reward = torch.zeros(3)
    nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=7)
    length = torch.tensor([0, 3, 2])
    mask = torch.arange(3) < length[:, None]
    forms = [
        {"tokens": nested, "other": nested.clone()},
        {"tokens": padded, "other": padded, "tokens_mask": mask},
        {"tokens": padded, "other": padded, "tokens_length": length},
    ]
    for form in forms:
        slot = rb.extend(TensorDict({**form, "log_reward": reward}, [3]))
        assert slot.tolist() == [0, 1, 2]
        assert rb.writer.slots_of(TensorDict(form, [3])).tolist() == [0, 1, 2]

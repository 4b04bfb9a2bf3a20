"""What collectors deliver, taken apart step by step in plain Python."""

from __future__ import annotations

from tensordict import TensorDict

from gfn_rb import Trajectories

Episode = tuple  # states, actions, log-reward, condition


class PlainPacker:
    """Puts episodes together one frame after the other."""

    def __init__(self):
        self.under_way = {}

    def pack(self, batch: TensorDict) -> list[Episode]:
        """Return the episodes that terminate in a batch [*B, T], by their ids."""
        frames = batch.reshape(-1) if batch.ndim > 1 else batch
        over = {}
        for i in range(len(frames)):
            number = int(frames["collector", "traj_ids"][i])
            if number < 0:
                continue
            self.under_way.setdefault(number, []).append(frames[i].clone())
            if frames["next", "done"][i].item():
                steps = self.under_way.pop(number)
                if steps[-1]["next", "terminated"].item():
                    over[number] = episode_of(steps)
        return [over[number] for number in sorted(over)]


def episode_of(steps: list[TensorDict]) -> Episode:
    states = [step["state"].tolist() for step in steps] + [steps[-1]["next", "state"].tolist()]
    actions = [step["action"].tolist() for step in steps]
    condition = steps[0]["condition"].tolist() if "condition" in steps[0].keys() else None  # noqa: SIM118
    return tuple(states), tuple(actions), float(steps[-1]["next", "log_reward"]), condition


def episodes_in(rows: TensorDict) -> list[Episode]:
    """Return the rows of a buffer or of a packed batch, without padding."""
    trajectories = Trajectories.from_tensordict(rows)
    out = []
    for i, length in enumerate(trajectories.length.tolist()):
        condition = trajectories.condition
        out.append(
            (
                tuple(trajectories.state[i, : length + 1].tolist()),
                tuple(trajectories.action[i, :length].tolist()),
                float(trajectories.log_reward[i]),
                None if condition is None else condition[i].tolist(),
            )
        )
    return out

"""A transformer over the letters of a sequence.

gfn-rb train examples.transformer:TransformerConfig --form prepend_append
"""

from dataclasses import dataclass

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gfn_rb.envs import GFNEnv
from gfn_rb.policies import Networks
from gfn_rb.training import TFBind8Config


class LetterTransformer(nn.Module):
    """Reads letters and empty places, and outputs the mean over all of them.

    Args:
        n_letters: letters are 0 to n_letters - 1; lower numbers are empty places.
        n_places: number of places of a sequence.
        n_out: number of outputs.
        width: features of a letter.
    """

    def __init__(self, n_letters: int, n_places: int, n_out: int, width: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(n_letters + 1, width)
        self.place = nn.Parameter(0.1 * torch.randn(n_places, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_out)

    def forward(self, state: Tensor) -> Tensor:
        """Return [n, n_out] numbers for states [n, n_places]."""
        x = self.letter(state.clamp(min=-1) + 1) + self.place
        return self.head(self.encoder(x).mean(1))


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(TFBind8Config):
    """Design DNA 8-mers by a transformer."""

    width: int = 32
    """Features of each letter."""
    lr: float = 1e-3
    """Adam's learning rate for the networks."""

    def make_networks(self, env: GFNEnv) -> Networks:
        """Return a TensorDictModule, which is given states as they are: letters."""
        network = LetterTransformer(4, env.state_shape[0], env.n_actions, self.width)
        return Networks(forward=TensorDictModule(network, ["state"], ["logits"]))

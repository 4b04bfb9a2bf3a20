"""The BGe score: how probable data is under the structure of a linear-Gaussian Bayesian network."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.shapes import Bool, Float64, Int64


class BGeScore:
    """Scores a node and its parents by the marginal likelihood of what was observed of them.

    With m samples of d nodes, and a normal-Wishart prior of mean zero, alpha_mu = 1,
    alpha_w = d + 2 and scale matrix t I, t = alpha_mu (alpha_w - d - 1) / (alpha_mu + 1), a set of
    l nodes Y has the marginal likelihood

        log p(D_Y) = l/2 log(alpha_mu / (alpha_mu + m)) - l m/2 log pi
            + log Gamma_l((m + alpha_w - d + l)/2) - log Gamma_l((alpha_w - d + l)/2)
            + l (alpha_w - d + l)/2 log t - (m + alpha_w - d + l)/2 log det R_YY

    where R = t I + (scatter about the mean) + alpha_mu m/(alpha_mu + m) (mean)(mean)^T, and a node
    X with parents P scores log p(D_{P+X}) - log p(D_P) (Geiger and Heckerman 1994; with the
    constants of Kuipers et al. 2014, arXiv:1402.6863). Graphs that imply the same independences
    have equal sums of scores.

    Args:
        data: one row per sample, [m, d].
    """

    alpha_mu = 1.0

    def __init__(self, data: Float64[Tensor, "m d"]) -> None:
        self.n_samples, self.n_nodes = data.shape
        self.alpha_w = self.n_nodes + 2.0
        t = self.alpha_mu * (self.alpha_w - self.n_nodes - 1) / (self.alpha_mu + 1)
        mean = data.mean(0)
        centred = data - mean
        weight = self.alpha_mu * self.n_samples / (self.alpha_mu + self.n_samples)
        eye = torch.eye(self.n_nodes, dtype=data.dtype, device=data.device)
        self._r = t * eye + centred.T @ centred + weight * mean.outer(mean)
        self._constant = self._constants(t, data.device)

    def __call__(
        self, node: Int64[Tensor, "k"], parents: Bool[Tensor, "k d"]
    ) -> Float64[Tensor, "k"]:
        """Return the score of each node with its parents, in nats.

        Args:
            node: in [0, d).
            parents: which nodes are its parents, never itself.
        """
        family = parents.scatter(1, node[:, None], True)
        n_parents = parents.sum(1)
        degrees = self.n_samples + self.alpha_w - self.n_nodes + n_parents
        without, together = self._log_det(parents), self._log_det(family)
        return self._constant[n_parents] + 0.5 * (degrees * without - (degrees + 1) * together)

    def _log_det(self, nodes: Bool[Tensor, "k d"]) -> Float64[Tensor, "k"]:
        """Return log det R of the rows and columns of some nodes, the others left out."""
        both = nodes[:, :, None] & nodes[:, None]  # elsewhere, the identity has no part in it
        rest = (~nodes).to(self._r.dtype).diag_embed()
        return torch.linalg.slogdet(self._r.where(both, rest)).logabsdet

    def _constants(self, t: float, device: torch.device) -> Float64[Tensor, "d"]:
        """Return what depends on the number of parents alone."""
        n_parents = torch.arange(self.n_nodes, dtype=torch.float64, device=device)
        degrees = self.alpha_w - self.n_nodes + n_parents + 1
        return (
            0.5 * math.log(self.alpha_mu / (self.alpha_mu + self.n_samples))
            - 0.5 * self.n_samples * math.log(math.pi)
            + torch.lgamma((self.n_samples + degrees) / 2)
            - torch.lgamma(degrees / 2)
            + 0.5 * (degrees + n_parents) * math.log(t)
        )

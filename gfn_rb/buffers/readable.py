"""Methods of buffers that show what they hold, for presets and merged buffers alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDictBase

from gfn_rb.arguments import KeepsArguments, as_count

if TYPE_CHECKING:
    import gfn_rb.buffers.summary


class Readable(KeepsArguments):
    """Methods of a replay buffer that show what it holds."""

    def best(self: Any, k: int = 10, key: NestedKey | None = None) -> TensorDictBase:
        """Return the k rows of highest reward, best first, as they were added.

        Each has its slot as ``index``, and in a merged buffer the number of
        its member as ``buffer_id``. Transforms of the buffer do not apply, except that compact rows
        are made whole. Rows of a ``RaggedStorage`` are padded.

        Args:
            k: number of rows, at least 1. Fewer are returned if the buffer holds fewer.
            key: entry of one number per row to rank by. Default: the key of the writer, else the
                first that rows have of ``episode_log_reward``, ``log_reward`` and ``reward``.

        Raises:
            EmptyBufferError: the buffer holds no rows.
            KeyMismatchError: rows have no rewards.
        """
        from gfn_rb.buffers.summary import best_rows  # which few programs need

        return best_rows(self, as_count("k", k), key)

    def summary(
        self: Any,
        describe: Any = None,
        objects: NestedKey | None = None,
        key: NestedKey | None = None,
    ) -> gfn_rb.buffers.summary.BufferSummary:
        """Return a summary, which prints as at most 12 lines.

        Args:
            describe: environment with a method ``describe``, or callable from objects [n, *S] to a
                text for each. Default: print the numbers.
            objects: entry that holds the object of each row. Default: the terminating state, else
                the entry of text, else that of several lengths, else the only one that neither
                measures a row nor counts its steps. If several may be it, the summary lists them.
            key: entry to rank rows by, as of :meth:`best`.

        Raises:
            KeyMismatchError: rows have no entry ``objects``.
            ArgumentError: ``describe`` is neither of them, raises, or does not return texts.

        Examples:
            >>> print(rb.summary(env))
        """
        from gfn_rb.buffers.summary import summarize

        return summarize(self, describe, objects, key)

    def to_pandas(self: Any, env: Any = None, k: int | None = None) -> Any:
        """Return what ``gfn_rb.checkpoint.export_table`` writes as a ``pandas.DataFrame``.

        Args:
            env: environment with a method ``describe``, or callable from objects [n, *S] to texts.
            k: number of objects, at least 1, best first. Default: all.

        Raises:
            ArgumentError: pandas is not installed, or ``env`` does not describe the objects.
        """
        from gfn_rb.buffers.summary import frame_of  # which few programs need

        return frame_of(self, env, k)

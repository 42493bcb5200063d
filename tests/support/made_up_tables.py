"""Step times of a made-up GPU, in closed form: decode 4 ms + 0.05 ms a sequence, prefill 20 us a token."""

from __future__ import annotations

from pdlab.sim.step_source import BilinearTable, Limits, LinearTable, Tabulated

DECODE_S, SEQUENCE_S, TOKEN_S = 4e-3, 0.05e-3, 20e-6
ENDS = 8192.0, 1024.0, 131_072.0


def made_up_tables(tp: int = 1) -> Tabulated:
    """Prefill and the sequences' share are divided by TP, the rest is not."""
    tokens, batch, context = ENDS

    def of_batch(fixed_s: float) -> BilinearTable:
        return BilinearTable(
            xs=(1.0, batch),
            ys=(1.0, context),
            z=tuple((fixed_s + SEQUENCE_S * n / tp,) * 2 for n in (1.0, batch)),
        )

    return Tabulated(
        shared=LinearTable(
            xs=(1.0, tokens + batch), ys=(DECODE_S + TOKEN_S / tp, DECODE_S + TOKEN_S * (tokens + batch) / tp)
        ),
        decode=of_batch(DECODE_S),
        generation_attention=of_batch(0.0),
        context_attention=BilinearTable(xs=(16.0, tokens), ys=(0.0, context), z=((0.0, 0.0), (0.0, 0.0))),
        limits=Limits(tokens=tokens + batch, batch=batch, context=context, prefill_tokens=tokens, prefix=context),
        provenance="made up",
    )

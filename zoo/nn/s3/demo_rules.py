"""How demo checkpoints fill the vocoder, by the older names of weight norm. The first match counts."""

from zoo.checkpoint.synthetic import Rule

VOCODER_RULES: tuple[Rule, ...] = (
    (r"^f0_predictor\.classifier\.bias$", 110.0, 0.0, False),  # the pitch of a voice, in Hz
    (r"^f0_predictor\.classifier\.weight$", 0.0, 60.0, True),
    (r"^conv_post\.weight_g$", 0.1, 0.01, False),  # quiet audio, far from the clamp
    (r"^m_source\.l_linear\.weight$", 0.0, 3.0, True),
    (r"^ups\..*weight_g$", 1.5, 0.2, False),
    (r"weight_g$", 0.7, 0.1, False),
    (r"\.alpha$", 1.0, 0.2, False),
)

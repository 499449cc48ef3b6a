"""Every tuning number of the engine, with its unit and one sentence that says what it does."""

from __future__ import annotations

# Prompts

STREAMING_PREFILL_TOKENS = 256
"""Prompt positions of one iteration at most: a long prompt costs the listeners one bounded launch per
iteration."""
THROUGHPUT_PREFILL_TOKENS = 1024
"""The same bound for engines without listeners."""
MAX_PROMPT_DELAY = 20
"""Iterations that a prompt waits at most for listeners that are about to run dry."""

# Windows

AT_RISK_S = 1.0
"""A listener with less audio than this gets windows of the middle shape, and not only full ones."""
FIRST_WINDOW_ITERATIONS = 6
"""Iterations that a listener's first window lasts for, to the nearest frame."""
MAX_LATE_IN_A_ROW = 2
"""Windows in a row that reach a listener too late; then it waits for the middle shape."""
BATCHED_PART = 0.75
"""Part of the middle shape from which a window is batched with others of that shape."""
GPU_MARGIN_FRAMES = 2
"""Frames of audio that a listener on a GPU has left when it is served at the latest."""
GPU_RENDERS_IN_FLIGHT = 3
"""Renders that a GPU has at once, if the shortest takes less than a step; meanwhile more windows are due,
and one launch of many rows takes less time than many of few."""
LONG_RENDER_STEPS = 4.0
"""If a model's shortest render takes longer than this many steps, steps make room for renders."""
PACE_STEPS = 3.0
"""Time from one step to the next while such a render is under way, in steps."""

# One window at a time

WINDOW_COST_DECAY = 0.98
"""Weight of older windows in the estimate of what a window takes, from one window to the next."""
WINDOW_COST_MARGIN = 1.3
"""Factor on the time that a window is expected to take."""
TAIL_PART = 0.6
"""If at most this part of the smallest window is left at the end of a speech, the last window takes those
frames too: another window would take longer."""
MAX_WINDOWS_AHEAD = 8
"""Windows of other listeners that may be made before a first window that is due."""

# Admission by time

COST_DECAY = 0.99
"""Weight of older iterations in the estimate of what an iteration takes: the last hundred count."""
COST_INERTIA = 0.01
"""Weight of the previous estimate, in iterations, for the part of the load that recent iterations say nothing
about."""
COST_OUTLIER = 4.0
"""An iteration that took longer than so many times its estimate counts as so many."""
MIN_ITERATIONS = 8
"""Iterations before which nothing is predicted, unless a warm-up timed the launches."""
SEED_TOKENS = 64
"""Prompt positions of the launch that the warm-up times."""
LATE_FACTOR = 2.0
"""Times `--max-ttfa`: an accepted request that would be heard later than this is refused while it waits."""
STALE_ITERATIONS = 100
"""Iterations after which an estimate for so many speakers may be tried again."""
CAPACITY_PART = 0.9
"""Part of a frame's length that an iteration may take, so that every stream is made in real time."""
RECENT_WEIGHT = 0.05
"""Weight of one new value in a running mean."""
TEXT_BYTES_HZ = 15.0
"""Bytes of text in a second of speech, before anything was spoken."""
CORRECTION_STEP = 0.1
"""Part of a prediction's error, as a logarithm, that corrects the next ones."""
MAX_CORRECTION = 3.0
"""Factor by which predictions are corrected at most."""
TRIAL_BUFFER_S = 0.3
"""Audio that every listener must have before one more stream is tried than estimates allow."""
LOOK_S = 0.1
"""Time from one look at the requests that wait to the next: time alone may make one late, or admit it to an
engine without work. A look takes 7 us per request."""

# Slots and pages

FLEXIBLE_SLOTS_KEPT = 4
"""One slot in so many is kept from flexible requests."""
MAX_SKIPS = 8
"""Smaller requests that may be admitted before one that lacks pages."""
RESUME_AT_RISK_S = 1.0
"""A paused stream with less audio than this takes the pages of another one."""
RESUME_MARGIN_S = 1.0
"""Audio that the other stream must have more."""
ADMIT_S = 3.0
"""No request is admitted while a paused stream has less audio than this."""
REPRODUCIBLE_CHUNK_PAGES = 4
"""Pages of a prompt's chunk where equal requests give equal bytes: prompts are always cut alike."""

# Refusals

MIN_RETRY_S = 1.0
"""The shortest `Retry-After` of a refused request."""
MAX_RETRY_S = 60.0
"""The longest `Retry-After` of a refused request."""

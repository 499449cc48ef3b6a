#!/usr/bin/env bash
# Builds the reference environments and remakes every fixture and manifest.
#   tests/parity/remake.sh [BASE]     BASE: see environments.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 PYTHONPATH=.

tests/parity/environments.sh "$@"
.venv-parity-qwen3_tts/bin/python tests/parity/oracle_qwen3_tts.py
.venv-parity-voxcpm2/bin/python tests/parity/oracle_voxcpm2.py
.venv-parity-higgs_v3/bin/python tests/parity/oracle_higgs_v3.py .venv-parity-higgs_v3/sglang_omni
.venv-parity-fish_s2/bin/python tests/parity/oracle_fish_s2.py
.venv-parity-fish_s2/bin/python tests/parity/oracle_fish_s1.py
.venv-parity-cosyvoice2/bin/python tests/parity/oracle_cosyvoice2.py
.venv-parity-orpheus/bin/python tests/parity/oracle_orpheus.py
.venv-parity-csm/bin/python tests/parity/oracle_csm.py
.venv-parity-zonos/bin/python tests/parity/oracle_zonos.py
.venv-parity-chatterbox/bin/python tests/parity/oracle_chatterbox.py
.venv-parity-glm4_voice/bin/python tests/parity/oracle_glm4_voice.py
.venv-parity-step_audio2/bin/python tests/parity/oracle_step_audio2.py
.venv-parity-opuslm/bin/python tests/parity/oracle_opuslm.py
.venv-parity-align/bin/python tests/parity/oracle_align.py
.venv-parity-bagpiper/bin/python tests/parity/oracle_bagpiper.py

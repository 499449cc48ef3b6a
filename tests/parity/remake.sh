#!/usr/bin/env bash
# Builds the reference environments, .venv-parity-FAMILY, and remakes every fixture and manifest.
#   tests/parity/remake.sh [BASE]     BASE: an environment with speechzoo[dev] (default .venv); its torch serves both
# Nothing is installed with its dependencies: they would bring another torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=$(cd "${1:-.venv}" && pwd)
export OMP_NUM_THREADS=1

"$base/bin/python" -m venv .venv-parity-qwen3_tts
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$base" >"$(site .venv-parity-qwen3_tts)/base.pth"
.venv-parity-qwen3_tts/bin/python -m pip install --quiet --no-deps \
    qwen-tts==0.1.1 transformers==4.57.3 tokenizers==0.22.2 huggingface-hub==0.36.2 accelerate==1.12.0 \
    requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.2 librosa==0.11.0 lazy-loader==0.6 audioread==3.1.0 soxr==1.1.0 \
    scipy==1.17.1 numba==0.68.1 llvmlite==0.50.0 joblib==1.6.0 cloudpickle==3.1.2 decorator==5.3.1 msgpack==1.2.4 pooch==1.9.0 platformdirs==4.14.7

PYTHONPATH=. .venv-parity-qwen3_tts/bin/python tests/parity/oracle_qwen3_tts.py

"$base/bin/python" -m venv .venv-parity-voxcpm2
site "$base" >"$(site .venv-parity-voxcpm2)/base.pth"
.venv-parity-voxcpm2/bin/python -m pip install --quiet --no-deps \
    voxcpm==2.0.3 librosa==0.11.0 lazy-loader==0.6 audioread==3.1.0 soxr==1.1.0 \
    scipy==1.17.1 numba==0.68.1 llvmlite==0.50.0 joblib==1.6.0 cloudpickle==3.1.2 decorator==5.3.1 msgpack==1.2.4 pooch==1.9.0 platformdirs==4.14.7

PYTHONPATH=. .venv-parity-voxcpm2/bin/python tests/parity/oracle_voxcpm2.py

# Of sglang-omni a few files are read, and nothing is installed: it would bring a server. torchaudio's compiled parts are for CUDA alone.
higgs=.venv-parity-higgs_v3
"$base/bin/python" -m venv "$higgs"
site "$base" >"$(site "$higgs")/base.pth"
"$higgs/bin/python" -m pip install --quiet --no-deps transformers==5.23.0 torchaudio==2.11.0
rm -f "$(site "$higgs")"/torchaudio/lib/*.so
"$higgs/bin/python" -m pip download --quiet --no-deps --dest "$higgs" sglang_omni==0.1.9
"$higgs/bin/python" -m zipfile -e "$higgs"/sglang_omni-0.1.9-*.whl "$higgs/sglang_omni"

PYTHONPATH=. "$higgs/bin/python" tests/parity/oracle_higgs_v3.py "$higgs/sglang_omni"

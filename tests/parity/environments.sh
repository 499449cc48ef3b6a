#!/usr/bin/env bash
# Builds the reference environments, .venv-parity-FAMILY: for the fixtures, `zoo parity` and `zoo bench --against reference`.
#   tests/parity/environments.sh [BASE]     BASE: an environment with speechzoo[dev] (default .venv); all of them use its torch
# Packages are installed without their dependencies, which would bring another torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=$(cd "${1:-.venv}" && pwd)
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# environment FAMILY PACKAGE==VERSION ...
environment() {
    local venv=.venv-parity-$1
    "$base/bin/python" -m venv "$venv"
    printf '%s\n' "$(site "$base")" "$PWD" >"$(site "$venv")/base.pth"  # $PWD: every reference.py uses zoo
    "$venv/bin/python" -m pip install --quiet --no-deps "${@:2}"
}

audio=(
    librosa==0.11.0 lazy-loader==0.6 audioread==3.1.0 soxr==1.1.0 scipy==1.17.1 numba==0.68.1 llvmlite==0.50.0 joblib==1.6.0
    cloudpickle==3.1.2 decorator==5.3.1 msgpack==1.2.4 pooch==1.9.0 platformdirs==4.14.7
)
environment qwen3_tts qwen-tts==0.1.1 transformers==4.57.3 tokenizers==0.22.2 huggingface-hub==0.36.2 accelerate==1.12.0 \
    requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.2 "${audio[@]}"
environment voxcpm2 voxcpm==2.0.3 "${audio[@]}"

# The packages are imported without their own __init__, which imports training code. torchaudio's compiled parts need CUDA.
environment cosyvoice2 cosyvoice-minicpmo==0.1.0 s3tokenizer==0.3.0 chatterbox-tts==0.1.7 transformers==5.23.0 torchaudio==2.11.0 \
    diffusers==0.42.1 conformer==0.3.2 omegaconf==2.4.0 antlr4-python3-runtime==4.13.2 onnx==1.23.2 protobuf==7.36.2 ml_dtypes==0.6.0 \
    pillow==13.0.0 importlib_metadata==10.2.0 zipp==4.1.2 requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.2 "${audio[@]}"
rm -f "$(site .venv-parity-cosyvoice2)"/torchaudio/lib/*.so

# Only a few files of sglang-omni are read; it is not installed, because it would bring a server. torchaudio's compiled parts need CUDA.
environment higgs_v3 transformers==5.23.0 torchaudio==2.11.0
higgs=.venv-parity-higgs_v3
rm -f "$(site "$higgs")"/torchaudio/lib/*.so
"$higgs/bin/python" -m pip download --quiet --no-deps --dest "$higgs" sglang_omni==0.1.9
"$higgs/bin/python" -m zipfile -e "$higgs"/sglang_omni-0.1.9-*.whl "$higgs/sglang_omni"

# Only the codec's modules of vllm-omni are imported, because the package around them would import a server.
environment fish_s2 fish-speech==0.1.0 vllm-omni==0.30.0 transformers==5.23.0 loguru==0.7.3 loralib==0.1.2 tiktoken==0.14.0 \
    regex==2026.11.15 click==8.5.1 tqdm==4.70.1

environment orpheus snac==1.2.1
environment csm transformers==5.23.0

# Zonos is no package: its source is taken from its repository, or from the copy of it in ZONOS_SOURCE. torchaudio's compiled parts
# need CUDA. inflect and segments, which phonemizer imports, bring the others.
environment zonos transformers==5.23.0 torchaudio==2.11.0 phonemizer==3.3.0 espeakng-loader==0.2.4 inflect==7.6.0 \
    more-itertools==11.2.1 typeguard==4.6.0 jaraco.functools==4.6.0 joblib==1.6.0 cloudpickle==3.1.2 segments==2.4.0 csvw==4.1.1 \
    dlinfo==2.0.0 isodate==0.7.2 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 language-tags==1.3.2 rdflib==7.6.0 \
    referencing==0.37.0 rfc3986==1.5.0 rpds-py==2026.9.1 termcolor==3.3.0 uritemplate==4.2.0 sudachipy==0.7.0 sudachidict-core==20261015 kanjize==1.6.1
zonos=.venv-parity-zonos
rm -f "$(site "$zonos")"/torchaudio/lib/*.so
rm -rf "$zonos/zonos"
git clone --quiet "${ZONOS_SOURCE:-https://github.com/Zyphra/Zonos}" "$zonos/zonos"
git -C "$zonos/zonos" checkout --quiet bc40d98
echo "$PWD/$zonos/zonos" >>"$(site "$zonos")/base.pth"
# torchaudio's compiled parts need CUDA; its Python parts are all that is used.
environment chatterbox chatterbox-tts==0.1.7 s3tokenizer==0.3.0 pyloudnorm==0.1.1 future==1.0.0 transformers==5.23.0 torchaudio==2.11.0 \
    diffusers==0.42.1 conformer==0.3.2 omegaconf==2.4.0 antlr4-python3-runtime==4.13.2 onnx==1.23.2 protobuf==7.36.2 ml_dtypes==0.6.0 \
    scikit-learn==1.9.1 threadpoolctl==3.8.0 narwhals==2.29.0 pillow==13.0.0 importlib_metadata==10.2.0 zipp==4.1.2 requests==2.34.2 \
    urllib3==2.8.0 charset-normalizer==3.5.2 "${audio[@]}"
rm -f "$(site .venv-parity-chatterbox)"/torchaudio/lib/*.so
# Flow and vocoder are the files of CosyVoice, and the LM and Whisper's layers are transformers'.
environment glm4_voice cosyvoice-minicpmo==0.1.0 transformers==5.23.0 torchaudio==2.11.0 diffusers==0.42.1 conformer==0.3.2 \
    omegaconf==2.4.0 antlr4-python3-runtime==4.13.2 importlib_metadata==10.2.0 zipp==4.1.2 pillow==13.0.0 requests==2.34.2 \
    urllib3==2.8.0 charset-normalizer==3.5.2 "${audio[@]}"
rm -f "$(site .venv-parity-glm4_voice)"/torchaudio/lib/*.so
# Flow and vocoder are the files of Step-Audio 2 in a package for MiniCPM-o, and the LM is transformers'.
environment step_audio2 stepaudio2-minicpmo==0.1.1 transformers==5.23.0 torchaudio==2.11.0 "${audio[@]}"
rm -f "$(site .venv-parity-step_audio2)"/torchaudio/lib/*.so
# ESPnet's SpeechLM is in no package: its source is taken from a fork by its author, or from the clone of it in OPUSLM_SOURCE. Of both
# sources only a few files are imported, because the packages around them would import the trainer.
environment opuslm transformers==5.23.0 scikit-learn==1.9.1 joblib==1.6.0 threadpoolctl==3.8.0 narwhals==2.29.0 scipy==1.17.1
opuslm=.venv-parity-opuslm
commit=5f0a39acd00d09f3124f6b6cea123cdaa9de9995
"$opuslm/bin/python" -m pip download --quiet --no-deps --ignore-requires-python --dest "$opuslm" espnet==202611
"$opuslm/bin/python" -m zipfile -e "$opuslm"/espnet-202611-*.whl "$opuslm/espnet"
rm -rf "$opuslm/speechlm"
mkdir "$opuslm/speechlm"
if [ -n "${OPUSLM_SOURCE:-}" ]; then
    git -C "$OPUSLM_SOURCE" archive --prefix=espnet/espnet2/ "$commit:espnet2" speechlm train/preprocessor.py
else
    curl --fail --silent --location "https://github.com/jctian98/espnet/archive/$commit.tar.gz" | gunzip
fi | tar -x -C "$opuslm/speechlm" --strip-components=1 --wildcards '*/espnet2/speechlm' '*/espnet2/train/preprocessor.py'
# torchaudio's compiled parts are used here. They are linked to CUDA's libraries, for which stubs stand on a CPU.
environment align torchaudio==2.11.0
lib=$(site .venv-parity-align)/torchaudio/lib
for name in libcudart.so.13 libc10_cuda.so libtorch_cuda.so; do
    gcc -shared -fPIC "-Wl,-soname,$name,--default-symver" tests/parity/align/cuda_stubs.c -o "$lib/$name"
done
# Of ESPnet only the files of its newer SpeechLM are imported, because the packages around them would import the trainer. joblib,
# which one of them imports, is not used.
environment bagpiper transformers==5.23.0 joblib==1.6.0
bagpiper=.venv-parity-bagpiper
"$bagpiper/bin/python" -m pip download --quiet --no-deps --ignore-requires-python --dest "$bagpiper" espnet==202611
"$bagpiper/bin/python" -m zipfile -e "$bagpiper"/espnet-202611-*.whl "$bagpiper/espnet"

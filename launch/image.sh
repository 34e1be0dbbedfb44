#!/usr/bin/env bash
# Dockerfile and megappo.def run this script in a CUDA image with a compiler and the headers of cuDNN and NCCL. The script
# creates a Python environment with all pinned packages in /opt/venv, and installs megappo from /opt/megappo. This takes an
# hour or more, mostly for Apex and Transformer Engine. MAX_JOBS limits the number of compilers; each needs some GB.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1
apt-get update
apt-get install -y --no-install-recommends build-essential ca-certificates git libnuma1 ninja-build python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

python3 -m venv /opt/venv
export PATH=/opt/venv/bin:$PATH
cd /opt/megappo
source launch/environment.sh
install_pip "$(type -P python)"
install_pins "$(type -P python)" "$(pins_of full "$(type -P python)")"
# Build dependencies, which pip does not install without build isolation.
pip install cmake ninja packaging pybind11 setuptools wheel
# Architectures: A100 (8.0), H100 and H200 (9.0), B200 (10.0), workstation GPUs of Blackwell (12.0).
export MAX_JOBS=${MAX_JOBS:-8} TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-"8.0 9.0 10.0 12.0"}
export APEX_CPP_EXT=1 APEX_CUDA_EXT=1
pip install --no-build-isolation -r launch/requirements-cuda.txt
pip install --no-deps .

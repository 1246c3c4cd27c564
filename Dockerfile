# turnwise with everything it needs, at the versions of requirements/constraints.txt.
#   docker build -t turnwise .                                   for the CPU
#   docker build -t turnwise:cuda --build-arg DEVICE=cuda .      for CUDA; run with --gpus all
#   docker run --rm -v "$PWD":/work turnwise train               the main job; runs/ stays in this folder
# torch's CUDA build brings the CUDA libraries; the machine gives the driver.
FROM python:3.11-slim

ARG DEVICE=cpu
ARG EXTRAS=lora,math,webshop

# Triton compiles its kernels with a C compiler when they are first used.
RUN if [ "$DEVICE" = cuda ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
        rm -rf /var/lib/apt/lists/*; \
    fi

ENV PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/requirements/constraints.txt
WORKDIR /src
COPY requirements requirements
RUN pip install -U pip setuptools && \
    TORCH=$(sed -n 's/^torch==//p' requirements/constraints.txt) && \
    if [ "$DEVICE" = cuda ]; then \
        pip install "torch==$TORCH"; \
    else \
        pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu"; \
    fi

COPY pyproject.toml README.md LICENSE ./
COPY turnwise turnwise
RUN pip install --build-constraint requirements/constraints.txt ".[$EXTRAS]" && turnwise envs

RUN useradd --create-home turnwise && mkdir /work && chown turnwise /work
USER turnwise
WORKDIR /work
ENTRYPOINT ["turnwise"]
CMD ["--help"]

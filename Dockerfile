# `make demo` in a container, without a GPU: docker build -t ds_zipccl . && docker run --rm ds_zipccl
# `make dockerfile` executes these lines where there is no Docker.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /ds_zipccl
COPY . .
# PyTorch's index of builds without CUDA, which are smaller by gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN PIP_EXTRA_INDEX_URL=$TORCH_INDEX make .venv/ready
CMD ["make", "demo"]

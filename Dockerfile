# syntax=docker/dockerfile:1
# docker build --target cpu  -t loka-serve:cpu .     reference engine, any machine
# docker build --target cuda -t loka-serve:cuda .    Hopper GPUs (driver 580 or newer)
# docker run -v ./bundle:/bundle:ro -p 8000:8000 loka-serve:cpu

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY loka_serve loka_serve
COPY kernels kernels
COPY engines engines
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 LOKA_BUNDLE=/bundle LOKA_HOST=0.0.0.0 LOKA_PORT=8000
RUN pip install --index-url https://download.pytorch.org/whl/cpu "torch>=2.11"
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN for wheel in /wheels/*.whl; do pip install "${wheel}[otel]"; done \
 && useradd --create-home --uid 10001 loka && install --directory --owner=10001 /home/loka/.cache
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['LOKA_PORT'] + '/health/ready', timeout=2)"]
ENTRYPOINT ["python", "-m", "loka_serve.serve"]

FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PATH=/opt/loka/bin:$PATH \
    LOKA_BUNDLE=/bundle LOKA_HOST=0.0.0.0 LOKA_PORT=8000 LOKA_DEVICE=cuda \
    HOME=/home/loka TRITON_CACHE_DIR=/home/loka/.cache/triton
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv gcc \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/loka \
 && pip install --index-url https://download.pytorch.org/whl/cu130 "torch>=2.11"
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN for wheel in /wheels/*.whl; do pip install "${wheel}[gpu,otel]"; done \
 && useradd --create-home --uid 10001 loka && install --directory --owner=10001 /home/loka/.cache
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
  CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['LOKA_PORT'] + '/health/ready', timeout=2)"]
ENTRYPOINT ["python3", "-m", "loka_serve.serve"]

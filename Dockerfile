# Container images of plait, for CPUs and for NVIDIA GPUs: docs/images.md has the how and why.
#   make image                                  or, by hand:
#   docker build --build-arg VARIANT=cpu -t plait:cpu .
#   docker build --build-arg VARIANT=gpu -t plait:gpu .
# Python's packages are pinned by constraints.txt. Debian's and Ubuntu's are not: their archives
# keep no older version, so a pin would only break the build.

# cpu or gpu: which of the stages below the others stand on.
ARG VARIANT=cpu
ARG CPU_BASE=python:3.12-slim-bookworm
ARG GPU_BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04
# An image whose files are wheels, for builds that reach no package index; at /wheels in pip's steps.
ARG WHEELS=scratch

# checkov:skip=CKV_DOCKER_7: scratch has no tag; what is given in its place leaves nothing in an image
FROM ${WHEELS} AS wheels

# --- what an image starts from: Python, the transfer engine's libraries, OpenMP, an init ---

FROM ${CPU_BASE} AS cpu-base
# hadolint ignore=DL3008
RUN apt-get -qq update \
    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
        libcurl4 libgomp1 libibverbs1 libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig

FROM ${GPU_BASE} AS gpu-base
# hadolint ignore=DL3008
RUN apt-get -qq update \
    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
        ibverbs-providers libcurl4 libgomp1 libibverbs1 libnuma1 python3 tini \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig

# --- what builds it has beside that ---

FROM cpu-base AS cpu-tools
ARG CPU_TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
ENV TORCH_ARGS="${CPU_TORCH_ARGS}"

FROM gpu-base AS gpu-tools
ARG GPU_TORCH_ARGS=
ENV TORCH_ARGS="${GPU_TORCH_ARGS}"
# hadolint ignore=DL3008
RUN apt-get -qq update \
    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
        gcc libc6-dev python3-dev python3-venv

# --- /opt/plait: a virtual environment that is whole, copied into the last stage ---

FROM ${VARIANT}-tools AS build
ARG VARIANT
ARG TORCH_SPEC=torch==2.13.0
ARG PIP_ARGS=
WORKDIR /src
COPY scripts/image_environment.sh scripts/
COPY pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.pem \
    sh scripts/image_environment.sh packages "${VARIANT}" "${TORCH_SPEC}" "${TORCH_ARGS}" "${PIP_ARGS}"
COPY . .
RUN sh scripts/image_environment.sh plait "${VARIANT}"

# --- the image: no compiler, no sources, nothing to write to but the volume and /tmp ---

FROM ${VARIANT}-base AS plait
ARG VARIANT
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="plait" \
      org.opencontainers.image.description="OpenAI-compatible inference server for long-context sparse-attention models (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
RUN groupadd --gid 10001 plait \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home \
        --home-dir /var/lib/plait --shell /usr/sbin/nologin plait \
    && install -d -o 10001 -g 10001 -m 0755 /var/lib/plait
COPY --from=build /opt/plait /opt/plait
COPY scripts/healthcheck.py /opt/plait/share/plait/
ENV PATH=/opt/plait/bin:$PATH \
    HOME=/var/lib/plait \
    PLAIT_HOME=/var/lib/plait \
    PLAIT_HOST=0.0.0.0 \
    PLAIT_PORT=8000 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/plait
VOLUME ["/var/lib/plait"]
EXPOSE 8000 7000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-I", "/opt/plait/share/plait/healthcheck.py"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/plait/bin/plait"]
CMD ["serve"]

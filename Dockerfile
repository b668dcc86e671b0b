# syntax=docker/dockerfile:1.7
# An image with rlkit and its locked dependencies, for a user who is not root:
#   docker build --platform linux/amd64 --tag rlkit .
#   docker run --rm --env TINKER_API_KEY --volume runs:/runs rlkit train examples/arithmetic.yaml

ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
# Extras of rlkit, separated by spaces, such as "beaker docent".
ARG EXTRAS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /app
# The dependencies change more seldom than the code: they are a layer of their own.
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/uv \
    set -eu; for extra in ${EXTRAS}; do set -- "$@" --extra "$extra"; done; \
    uv sync --frozen --no-dev --no-install-project "$@"
COPY src ./src
RUN --mount=type=cache,target=/root/.cache/uv \
    set -eu; for extra in ${EXTRAS}; do set -- "$@" --extra "$extra"; done; \
    uv sync --frozen --no-dev --no-editable "$@"

FROM python:${PYTHON}
# git fetches the code of a job, tmux is what the terminal agent types into.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git tmux \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 rlkit \
    && install --directory --owner rlkit --group rlkit /runs /work
COPY --from=build --chown=rlkit:rlkit /app/.venv /app/.venv
COPY --chown=rlkit:rlkit examples /work/examples
ENV PATH=/app/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RLKIT_RUNS_DIR=/runs
USER 1000
WORKDIR /work
VOLUME ["/runs"]
ENTRYPOINT ["rlkit"]
CMD ["--help"]

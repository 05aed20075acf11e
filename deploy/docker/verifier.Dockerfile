# The verifier: gRPC on 7001, /metrics on 9101.
# Build from the repository's root:  docker build -f deploy/docker/verifier.Dockerfile -t outrider-verifier .
# PIP_EXTRA_ARGS goes to the install of TORCH alone, for the build of torch that you want, as
#   --build-arg PIP_EXTRA_ARGS="--index-url <index of wheels for CPU or for your CUDA>"
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_ARGS=""
# Two environments: what the image runs, which has not even pip, and the tools that make it.
RUN python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/tools
ENV PIP="/opt/tools/bin/pip --python /opt/venv/bin/python --disable-pip-version-check"
WORKDIR /src
# Every pip below installs these versions; pip older than 25.3 reads the first for builds too.
COPY deploy/constraints.txt deploy/
ENV PIP_CONSTRAINT=/src/deploy/constraints.txt PIP_BUILD_CONSTRAINT=/src/deploy/constraints.txt
# torch first and pinned, in a layer of its own: the biggest part, and the one that changes least.
RUN --mount=type=cache,target=/root/.cache/pip $PIP install $PIP_EXTRA_ARGS "$TORCH"
# pyproject.toml alone installs the dependencies and an empty package: a layer that no change of the source touches.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip $PIP install '.[engine,tracing]' && $PIP uninstall --yes outrider

FROM packages AS build
RUN --mount=type=cache,target=/root/.cache/pip /opt/tools/bin/pip install --disable-pip-version-check grpcio-tools
COPY protos protos
RUN /opt/tools/bin/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/outrider/v1/*.proto
COPY README.md LICENSE ./
COPY outrider/__init__.py outrider/
COPY shared outrider/shared
COPY kernels outrider/kernels
COPY engine outrider/engine
COPY drafting outrider/drafting
COPY verifier_service outrider/verifier_service
COPY training outrider/training
# The `outrider` command belongs to the client, which is not in here.
RUN /opt/tools/bin/pip install --disable-pip-version-check --no-deps --target /opt/app . && rm -r /opt/app/bin
# Where compiled kernels are kept; a volume that is mounted there begins with the image's.
RUN mkdir /opt/cache

FROM ${PYTHON_IMAGE}
# On CUDA: "gcc libc6-dev", with which triton compiles its launchers.
ARG APT_PACKAGES=""
RUN [ -z "$APT_PACKAGES" ] || (apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES \
    && rm -rf /var/lib/apt/lists/*)
COPY --from=packages /opt/venv /opt/venv
COPY --from=build /opt/app /opt/app
COPY --from=build --chown=10001:10001 /opt/cache /var/cache/outrider
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=outrider \
    NUMBA_CACHE_DIR=/var/cache/outrider HF_HOME=/tmp/huggingface HF_HUB_OFFLINE=1 \
    OUTRIDER_HOST=0.0.0.0 OUTRIDER_PORT=7001 OUTRIDER_METRICS_PORT=9101
WORKDIR /app
USER 10001:10001
# The service starts once, so that its kernels for this machine's kind of CPU are in the image. Another kind compiles its
# own at the first start. 0: none.
ARG COMPILE_KERNELS=1
RUN --mount=type=bind,source=models/demo-target,target=models/demo-target --mount=type=tmpfs,target=/tmp \
    [ "$COMPILE_KERNELS" = 0 ] || { python -m outrider.verifier_service --model models/demo-target & \
    until python -IS /opt/app/outrider/shared/healthcheck.py 127.0.0.1:7001 >/dev/null; do kill -0 $! || exit 1; sleep 1; done; \
    kill $! && wait $!; }
EXPOSE 7001 9101
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=10s --start-period=600s --retries=3 \
    CMD ["/opt/venv/bin/python", "-IS", "/opt/app/outrider/shared/healthcheck.py", "127.0.0.1:7001"]
ENTRYPOINT ["/opt/venv/bin/python", "-m", "outrider.verifier_service"]

# The gateway: REST on 8000, gRPC on 8001. No torch in here.
# Build from the repository's root:  docker build -f deploy/docker/gateway.Dockerfile -t outrider-gateway .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
# Two environments: what the image runs, which has not even pip, and the tools that make it.
RUN python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/tools
ENV PIP="/opt/tools/bin/pip --python /opt/venv/bin/python --disable-pip-version-check"
WORKDIR /src
# Every pip below installs these versions; pip older than 25.3 reads the first for builds too.
COPY deploy/constraints.txt deploy/
ENV PIP_CONSTRAINT=/src/deploy/constraints.txt PIP_BUILD_CONSTRAINT=/src/deploy/constraints.txt
# pyproject.toml alone installs the dependencies and an empty package: a layer that no change of the source touches.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip $PIP install '.[gateway,tracing]' && $PIP uninstall --yes outrider

FROM packages AS build
RUN --mount=type=cache,target=/root/.cache/pip /opt/tools/bin/pip install --disable-pip-version-check grpcio-tools
COPY protos protos
RUN /opt/tools/bin/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/outrider/v1/*.proto
COPY README.md LICENSE ./
COPY outrider/__init__.py outrider/
COPY shared outrider/shared
COPY gateway outrider/gateway
# The `outrider` command belongs to the client, which is not in here.
RUN /opt/tools/bin/pip install --disable-pip-version-check --no-deps --target /opt/app . && rm -r /opt/app/bin
# Where Compose keeps models of the Hub; a volume that is mounted there begins as the image's user's.
RUN mkdir /opt/hub

FROM ${PYTHON_IMAGE}
COPY --from=packages /opt/venv /opt/venv
COPY --from=build /opt/app /opt/app
COPY --from=build --chown=10001:10001 /opt/hub /var/cache/huggingface
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    HF_HOME=/tmp/huggingface HF_HUB_OFFLINE=1 OUTRIDER_HOST=0.0.0.0 OUTRIDER_PORT=8000 OUTRIDER_GRPC_PORT=8001
WORKDIR /app
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# Healthy once the gRPC server serves and a request could be answered: Redis is there, and a verifier.
HEALTHCHECK --interval=5s --timeout=10s --start-period=600s --retries=3 \
    CMD ["/opt/venv/bin/python", "-IS", "/opt/app/outrider/shared/healthcheck.py", "127.0.0.1:8001", "127.0.0.1:8000/ready"]
ENTRYPOINT ["/opt/venv/bin/python", "-m", "outrider.gateway"]

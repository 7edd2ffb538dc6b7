# A model behind HTTP. The model folder is mounted; teaching needs it writable and a token:
#   docker build -t onea .
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/shop.onea:/model" -e ONEA_TOKEN="$(openssl rand -hex 24)" onea
# The base is named by its digest, because a tag may name another image tomorrow. For a newer one:
#   docker pull python:3.12-slim && docker inspect --format '{{index .RepoDigests 0}}' python:3.12-slim
#   docker build --build-arg BASE=python@sha256:... -t onea .
ARG BASE=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
FROM ${BASE}

RUN useradd --create-home --uid 10001 onea
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[serve]"

USER onea
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# Inside a container every address is the container's own: what may reach it is decided by -p above.
ENTRYPOINT ["onea", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]

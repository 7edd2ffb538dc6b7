# A model behind HTTP. The model folder is mounted; teaching needs it writable and a token:
#   docker build -t onea .
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/shop.onea:/model" -e ONEA_TOKEN="$(openssl rand -hex 24)" onea
FROM python:3.12-slim

RUN useradd --create-home --uid 10001 onea
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src ./src
# Without a GPU a smaller build of PyTorch will do: --build-arg PIP_EXTRA_INDEX_URL=... (an index that has one).
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir -c constraints.txt ".[serve]"

USER onea
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# Inside a container every address is the container's own: what may reach it is decided by -p above.
ENTRYPOINT ["onea", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]

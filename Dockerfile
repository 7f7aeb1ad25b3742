# docker build -t dinfer . && docker run --rm -p 127.0.0.1:8000:8000 -e DINFER_API_KEYS=secret dinfer
# Serves tiny-sdar; give other models after the image's name. Stop it with --time 40, so that calls in
# progress can end. PyTorch's usual build for Linux brings CUDA along (docker run --gpus all); with
# --build-arg TORCH_INDEX=URL, PyTorch's index of CPU builds, the image is some GB smaller.
FROM python:3.12-slim
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
WORKDIR /dinfer
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[server]" && useradd --create-home dinfer
USER dinfer
EXPOSE 8000
HEALTHCHECK CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"
ENTRYPOINT ["dinfer", "serve", "--host", "0.0.0.0"]
CMD ["tiny-sdar"]

# docker build -t dinfer . && docker run --rm -p 127.0.0.1:8000:8000 -e DINFER_API_KEYS=secret dinfer
# Serves tiny-sdar; give other models after the image's name. For a GPU add --gpus all.
FROM python:3.12-slim
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /dinfer
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[server]" && useradd --create-home dinfer
USER dinfer
EXPOSE 8000
ENTRYPOINT ["dinfer", "serve", "--host", "0.0.0.0"]
CMD ["tiny-sdar"]

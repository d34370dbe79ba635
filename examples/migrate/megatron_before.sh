#!/usr/bin/env bash
# A training with Megatron-LM, on 16 GPUs: a llama of 8 billion parameters.
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29500 pretrain_gpt.py \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm \
    --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights \
    --vocab-size 128256 --max-position-embeddings 8192 \
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --train-iters 10000 --bf16 \
    --recompute-activations --optimizer adam --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --data-path corpus --save runs/llama3-8b --save-interval 500

"""Pretrained networks converted to momentum networks: what is left of them right after, and what a short refit brings back.

    python -m retrograde_experiments.pretrained prepare --data-dir data      # downloads to plain files, checked
    python -m retrograde_experiments.pretrained cifar --data-dir data --out experiments/results/pretrained
    python -m retrograde_experiments.pretrained report                       # tables and figure of docs/pretrained.md

weights      the pretrained networks, checked; cifar_resnet: one of their architectures
text         Shakespeare as tokens and sentences; photos: sample photographs
prepare      from what is downloaded to what is read here; parts small enough to carry
transfer     convert, re-estimate, refit, warm up: what the experiments have in common
cifar_transfer, imagenet_photos, language, sentence      one experiment each
deploy, deploy_images     fine-tuned in reverse, then used as itself and as the plain network; memory and time of a step
characters   the same with a small GPT over characters, in minutes on a CPU
run, store   units of work, in several processes, one line of JSON each
report       the page from the lines alone
"""

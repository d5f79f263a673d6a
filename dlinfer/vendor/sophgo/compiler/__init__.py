"""Sophgo's compiler: conversion to the ONNX that it reads, its processes, and the cache of compiled bmodels."""

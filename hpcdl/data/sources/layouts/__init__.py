"""Layouts that several formats share: arrays, columns, folders, images, records."""

/** Everything that pages are built of, under one name. */
export * from "rlkit/api";
export * from "rlkit/chart";
export * from "rlkit/controls";
export * from "rlkit/dom";
export * from "rlkit/format";
export * from "rlkit/parts";
export * from "rlkit/route";
export * from "rlkit/runview";
export * from "rlkit/table";
export * from "rlkit/text";
